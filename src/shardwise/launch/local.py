"""Starts the workers of this host through torch's elastic agent and answers for them.

The entry point is a function, so that workers are children of this process and can be bound to its life. What elastic
would leave open is settled here: rendezvous (`shardwise.launch.rendezvous`), the terminal to rank 0 alone, and signal
handlers put back afterwards. When to restart and what a failure was is in `shardwise.launch.agent`. SHARDWISE_DEBUG=1
shows elastic's log and every rank's output.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from inspect import signature
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed.elastic.agent.server import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.rendezvous import RendezvousHandler

from shardwise._torch_compat import accelerator
from shardwise.errors import ConfigError, MachineError, ShardwiseError, require_type
from shardwise.launch import descendants, failure, loopback
from shardwise.launch.agent import Agent, restore_cursor
from shardwise.launch.diagnosis import UNGUARDED, UNGUARDED_EXIT, logs_of, reports_of
from shardwise.launch.hosts import HostEnvironment
from shardwise.launch.interrupt import SIGNALS as FORWARDED
from shardwise.launch.interrupt import take_interrupts
from shardwise.launch.process_group import waits_for_peers
from shardwise.launch.rendezvous import exchange_of, rendezvous_of
from shardwise.launch.signals import Forwarding, forwarding
from shardwise.launch.watch.announced import announce_rank
from shardwise.launch.watch.watcher import DEFAULTS, WatchSettings, watched
from shardwise.observe.standard_streams import flush_or_leave, secure_streams

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
SIGNALS_OF_TORCH = "TORCHELASTIC_SIGNALS_TO_HANDLE"  # where its agent looks for them
SHUTDOWN_SECONDS = 10  # from a polite signal to SIGKILL

Call = tuple[Path, bool, Callable[..., Any], tuple]  # of a worker: run's directory, are signals forwarded, function


def run_local(
    function: Callable[..., Any],
    args: tuple,
    workers: int,
    *,
    device_type: str = "cpu",
    forward_signals: bool | Forwarding = False,
    max_restarts: int = 0,
    host: HostEnvironment | None = None,
    rendezvous: RendezvousHandler | None = None,
    watch: WatchSettings = DEFAULTS,
) -> list[Any]:
    """Calls `function(*args)` in `workers` new processes with torch's rank variables set; their results by rank.

    `host` is this host's place among several, each of which starts as many workers: their ranks follow one another, and
    the results are those of this host. `rendezvous` is how they meet, where not at the address of host 0.

    `watch` says when a step takes so long that the launcher says where the ranks are.

    A worker that fails or exits early ends the others; all are started again, with TORCHELASTIC_RESTART_COUNT one
    higher, up to `max_restarts` times, unless its error is a user's mistake, which would repeat itself.

    Ctrl-C and deadly signals end the run. With `forward_signals` SIGTERM and SIGUSR1 are passed on to the workers
    instead, as is SIGHUP unless it is ignored here; they may heed them and return as usual. A SIGTERM that comes later
    than two seconds after the first ends the run. What was received stands in a `Forwarding` that is given.

    Raises:
        ConfigError: an argument is of another type or cannot be pickled, or a script without a guard has called this
            while a worker imports it.
        ShardwiseError: the failing rank's own error of the last attempt, if it is a ShardwiseError.
        WorkerError: any other failure of a worker; ends with its traceback.
        KeyboardInterrupt: Ctrl-C.
        SystemExit: another deadly signal, here or (if it was passed on) in a worker.
    """
    _check_call(function, args, workers)
    if accelerator.is_accelerator(device_type) and accelerator.count(device_type) == 0:
        raise MachineError(f"the workers are for {device_type} and this host shows no GPU; use parallel.device=cpu")
    refuse_unguarded_script("local workers")
    try:
        with ExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shardwise-run-")))  # mode 0700
            for surrounding in (_own_children_ended(), _signals_handled(bool(forward_signals)), _elastic_log_hidden()):
                stack.enter_context(surrounding)
            given = forward_signals if isinstance(forward_signals, Forwarding) else None
            signals = stack.enter_context(forwarding(given)) if forward_signals else None
            call = directory, bool(forward_signals), function, args
            spec = _spec(call, workers, max_restarts, rendezvous or rendezvous_of(host))
            stack.callback(spec.rdzv_handler.shutdown)
            agent = Agent(spec, _logs(directory, workers, host), directory, signals, **_patience())
            stack.enter_context(watched(watch, directory, agent.reports, exchange_of(spec.rdzv_handler)))
            results = agent.run().return_values
    except SignalException as error:
        restore_cursor()
        _end(error.sigval)
    except Exception as error:
        if isinstance(error, ShardwiseError) or "pickle" not in str(error):
            raise
        raise _cannot_be_sent(function, error) from error
    return [results[rank] for rank in sorted(results)]


def _cannot_be_sent(function: Callable[..., Any], error: Exception) -> ConfigError:
    return ConfigError(
        f"function={function!r} or its args cannot be sent to the workers ({error}); give a function at the top of a "
        "module, and arguments that can be pickled"
    )


def _check_call(function: Callable[..., Any], args: tuple, workers: int) -> None:
    if not callable(function):
        raise ConfigError(f"function={function!r}: must be callable; give a function at the top of a module")
    require_type(args, tuple, "args", "give the function's arguments as (first, second)")
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise ConfigError(f"workers={workers!r}: must be a whole number of at least 1; use 1 or more")


def refuse_unguarded_script(caller: str) -> None:
    """Refuse to go on where a worker that starts is importing the script that has started it.

    Raises:
        SystemExit: with the code by which the launcher knows it; the message stands on stderr.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        print(f"error: {caller}: {UNGUARDED}", file=sys.stderr, flush=True)
        raise SystemExit(UNGUARDED_EXIT)


def _spec(call: Call, workers: int, max_restarts: int, rendezvous: RendezvousHandler) -> WorkerSpec:
    return WorkerSpec(
        role="shardwise",
        local_world_size=workers,
        entrypoint=_work,
        args=(call,),
        rdzv_handler=rendezvous,
        max_restarts=max_restarts,
        monitor_interval=0.1,
        local_addr=loopback.ADDRESS,
    )


def _patience() -> dict[str, Any]:
    """torch 2.11 has no such argument and waits for 30 seconds."""
    known = signature(LocalElasticAgent.__init__).parameters
    return {"shutdown_timeout": SHUTDOWN_SECONDS} if "shutdown_timeout" in known else {}


def _logs(directory: Path, workers: int, host: HostEnvironment | None) -> DefaultLogsSpecs:
    is_first_host = host is None or host.index == 0
    return DefaultLogsSpecs(str(logs_of(directory)), redirects=_redirects(workers, is_first_host))


def _debug() -> bool:
    return os.environ.get("SHARDWISE_DEBUG", "") not in ("", "0")


def _redirects(workers: int, is_first_host: bool) -> dict[int, Std]:
    """Rank 0 writes to the terminal, where its display lives; the others' output is kept for the case of a failure."""
    return {} if _debug() else dict.fromkeys(range(1 if is_first_host else 0, workers), Std.ALL)


# ---- in the worker


def _work(call: Call) -> Any:
    """A worker's body. `call` is one argument because elastic substitutes `$` in arguments that are strings."""
    loopback.die_with_parent()
    secure_streams()
    directory, forward_signals, function, args = call
    reports = reports_of(directory, int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
    failure.announce(reports)
    announce_rank(reports, int(os.environ["RANK"]))
    try:
        take_interrupts()
        result = function(*args)
        ForkingPickler.dumps(result)  # an unpicklable result is this rank's error too
        if forward_signals:  # torch's launcher hangs if a worker dies while it waits for its result to be read
            for number in FORWARDED:
                signal.signal(number, signal.SIG_IGN)
        return result
    except (Exception, SystemExit) as error:
        if failure.report(error):
            time.sleep(2 * SHUTDOWN_SECONDS)  # a peer died: let the launcher see that one and end us
        if waits_for_peers():  # at the end of the process too, and the launcher would wait with us
            _leave(1)
        # Not raised again: torch would leave its traceback behind as a pickle in the temporary directory.
        raise SystemExit(1) from None
    except KeyboardInterrupt:  # torch would end this process as if all were well, and wait for its result for ever
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # elastic sends another, which would meet what runs at exit
        _leave(128 + signal.SIGINT)


def _leave(exit_code: int) -> NoReturn:
    """End this process without what runs at exit."""
    flush_or_leave("stdout")
    flush_or_leave("stderr")
    os._exit(exit_code)


# ---- its end


def _end(received: signal.Signals) -> NoReturn:
    if received == signal.SIGINT:
        raise KeyboardInterrupt from None
    raise SystemExit(128 + received) from None  # as a shell reports a process that died of it


# ---- this process, while it waits


@contextmanager
def _own_children_ended() -> Iterator[None]:
    """No worker outlives the call, whatever interrupted elastic's own clean-up (a second Ctrl-C, say)."""
    before = {child.pid for child in multiprocessing.active_children()}
    try:
        yield
    except BaseException:
        for child in multiprocessing.active_children():
            if child.pid is not None and child.pid not in before:
                with descendants.ended_too([child.pid]):
                    child.kill()
                child.join()
        raise


@contextmanager
def _signals_handled(forwarded: bool) -> Iterator[None]:
    """Elastic installs handlers and leaves them; a Python session that goes on wants its own back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    variable = os.environ.get(SIGNALS_OF_TORCH)
    os.environ[SIGNALS_OF_TORCH] = ",".join(_signals_of_elastic(forwarded))
    try:
        yield
    finally:
        os.environ.pop(SIGNALS_OF_TORCH)
        if variable is not None:
            os.environ[SIGNALS_OF_TORCH] = variable
        for number, handler in before.items():
            signal.signal(number, handler)


def _signals_of_elastic(forwarded: bool) -> list[str]:
    """Return the signals at which elastic ends the workers: not what they are given, nor a hang-up under nohup."""
    elsewhere = set(FORWARDED) if forwarded else set()
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        elsewhere.add(signal.SIGHUP)
    return [number.name for number in SIGNALS if number not in elsewhere]


@contextmanager
def _elastic_log_hidden() -> Iterator[None]:
    """Hide what elastic logs about a failing worker: it says less than the error we raise."""
    prefixes = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing")
    loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict if name.startswith(prefixes)]
    changed = [] if _debug() else [logger for logger in loggers if not logger.disabled]
    for logger in changed:
        logger.disabled = True
    try:
        yield
    finally:
        for logger in changed:
            logger.disabled = False
