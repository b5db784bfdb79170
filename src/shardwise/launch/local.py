"""Starts the workers of one host through torch's elastic launch API and answers for them.

The entry point is a function, so that workers are children of this process and can be bound to its life. What elastic
would leave open is settled here: rendezvous on the loopback interface (`_LoopbackRendezvous`; torch's own unpickles
what any peer writes into it), the first failing rank's own error as the run's error, the terminal to rank 0 alone, and
signal handlers put back afterwards. SHARDWISE_DEBUG=1 shows elastic's log and every rank's output.
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
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from shardwise.errors import MachineError, ShardwiseError, WorkerError
from shardwise.launch import failure, loopback

SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
SHUTDOWN_SECONDS = 10  # from a polite signal to SIGKILL
OUTPUT_LINES = 30  # of a failed rank's stderr
SHOW_CURSOR = "\x1b[?25h"


def run_local(function: Callable[..., Any], args: tuple, workers: int, *, device_type: str = "cpu") -> list[Any]:
    """Calls `function(*args)` in `workers` new processes with torch's rank variables set; their results by rank.

    A worker that fails or exits early ends the run: its own error is raised, of the same class if it is a
    ShardwiseError, else as a WorkerError that ends with its traceback. Ctrl-C raises KeyboardInterrupt, other deadly
    signals SystemExit.
    """
    _check_devices(workers, device_type)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shardwise-run-")))  # mode 0700
        for surrounding in (_own_children_ended(), _signals_restored(), _elastic_log_hidden()):
            stack.enter_context(surrounding)
        try:
            results = elastic_launch(_config(workers, directory), _work)((directory, function, args))
        except ChildFailedError as error:
            _restore_cursor()
            raise _diagnose(directory, workers, *error.get_first_failure()) from None
        except SignalException as error:
            _restore_cursor()
            _end(error.sigval)
    return [results[rank] for rank in range(workers)]


def _check_devices(workers: int, device_type: str) -> None:
    if device_type != "cuda":
        return
    count = torch.cuda.device_count()
    if workers > count:
        fix = f"use parallel.workers={count} or less" if count else "use parallel.device=cpu"
        raise MachineError(f"parallel.workers={workers} needs as many GPUs, this host shows {count}; {fix}")


def _config(workers: int, directory: Path) -> LaunchConfig:
    extra: dict[str, Any] = {}
    if any(field.name == "shutdown_timeout" for field in fields(LaunchConfig)):  # torch 2.11 has no such field
        extra["shutdown_timeout"] = SHUTDOWN_SECONDS
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workers,
        run_id=uuid.uuid4().hex,
        role="shardwise",
        rdzv_backend=_LoopbackRendezvous.NAME,
        local_addr=loopback.ADDRESS,
        max_restarts=0,
        start_method="spawn",
        signals_to_handle=",".join(SIGNALS),
        logs_specs=DefaultLogsSpecs(str(directory / "output"), redirects=_redirects(workers)),
        **extra,
    )


def _debug() -> bool:
    return os.environ.get("SHARDWISE_DEBUG", "") not in ("", "0")


def _redirects(workers: int) -> dict[int, Std]:
    """Rank 0 writes to the terminal, where its display lives; the others' output is kept for the case of a failure."""
    return {} if _debug() else dict.fromkeys(range(1, workers), Std.ALL)


# ---- in the worker


def _work(call: tuple[Path, Callable[..., Any], tuple]) -> Any:
    """A worker's body. `call` is one argument because elastic substitutes `$` in arguments that are strings."""
    loopback.die_with_parent()
    directory, function, args = call
    failure.announce(directory)
    try:
        result = function(*args)
        ForkingPickler.dumps(result)  # an unpicklable result is this rank's error too
        return result
    except (Exception, SystemExit) as error:
        if failure.report(error):
            time.sleep(2 * SHUTDOWN_SECONDS)  # a peer died: let the launcher see that one and end us
        # Not raised again: torch would leave its traceback behind as a pickle in the temporary directory.
        raise SystemExit(1) from None
    except KeyboardInterrupt:  # torch would end this process as if all were well, and wait for its result for ever
        raise SystemExit(128 + signal.SIGINT) from None


# ---- rendezvous


class _LoopbackRendezvous(RendezvousHandler):
    """One node that meets nobody: a store on the loopback interface, which the workers then use as theirs."""

    NAME = "shardwise-loopback"

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id
        self._store: dist.Store | None = None

    def get_backend(self) -> str:
        return self.NAME

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        self._store = store = loopback.serve_store()
        address = RendezvousStoreInfo(loopback.ADDRESS, store.port)
        return RendezvousInfo(dist.PrefixStore(self._run_id, store), 0, 1, address)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self._store = None
        return True


rendezvous_handler_registry.register(_LoopbackRendezvous.NAME, _LoopbackRendezvous)


# ---- what a failure was


def _diagnose(directory: Path, workers: int, rank: int, seen: ProcessFailure) -> ShardwiseError:
    """The first failing rank's own error; elastic saw rank `rank` end first, which need not be the one."""
    reports = failure.collect(directory)
    if reports and (not reports[0].dead_before or rank in {report.rank for report in reports}):
        return reports[0].to_error(_last_output(directory, reports[0].rank))
    how = f"was killed by {seen.signal_name()} (signal {-seen.exitcode})"
    if seen.exitcode >= 0:
        how = f"ended with exit code {seen.exitcode} and no error of its own"
    elif seen.exitcode == -signal.SIGKILL:
        how += ", which is what the kernel does to a process when memory runs out"
    return WorkerError(f"{_last_output(directory, rank)}rank {rank} of {workers} {how}")


def _last_output(directory: Path, rank: int) -> str:
    """What the rank wrote to stderr, if that did not go to the terminal."""
    lines: list[str] = []
    for path in (directory / "output").glob(f"*/attempt_*/{rank}/stderr.log"):
        lines += path.read_text(errors="replace").splitlines()
    if not lines:
        return ""
    return f"last lines that rank {rank} wrote to stderr:\n" + "".join(f"  {line}\n" for line in lines[-OUTPUT_LINES:])


def _end(received: signal.Signals) -> NoReturn:
    if received == signal.SIGINT:
        raise KeyboardInterrupt from None
    raise SystemExit(128 + received) from None  # as a shell reports a process that died of it


def _restore_cursor() -> None:
    """A live display that was killed leaves the terminal without a cursor."""
    if sys.stdout.isatty():
        sys.stdout.write(SHOW_CURSOR)
        sys.stdout.flush()


# ---- this process, while it waits


@contextmanager
def _own_children_ended() -> Iterator[None]:
    """No worker outlives the call, whatever interrupted elastic's own clean-up (a second Ctrl-C, say)."""
    before = {child.pid for child in multiprocessing.active_children()}
    try:
        yield
    except BaseException:
        for child in multiprocessing.active_children():
            if child.pid not in before:
                child.kill()
                child.join()
        raise


@contextmanager
def _signals_restored() -> Iterator[None]:
    """Elastic installs handlers and leaves them; a Python session that goes on wants its own back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {name: signal.getsignal(getattr(signal, name)) for name in SIGNALS}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)


@contextmanager
def _elastic_log_hidden() -> Iterator[None]:
    """What elastic logs about a failing worker says less than the error we raise."""
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
