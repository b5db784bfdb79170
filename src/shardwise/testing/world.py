"""Worlds of ranks for tests: one pool of worker processes that lives as long as the test session.

Starting a process that imports torch and transformers takes seconds, so a fork server imports them once and each
worker is a fork of it. A run gives the first `world_size` workers a new Gloo group over the loopback interface and
calls one function on each. A rank that raises, dies or hangs fails the run with a `WorldError` that shows what every
rank was doing, the first failing rank last; workers that cannot be trusted any more are replaced at the next run.

Pool and workers talk pickle over pipes of their own process family, never over a socket.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib.util
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.launch import loopback
from shardwise.launch.environment import RankEnvironment

PRELOAD = (
    "torch",
    "torch.distributed.fsdp",
    "transformers.modeling_utils",
    "shardwise.training.trainer",
    "shardwise.smp.v1",
    "shardwise.smp.v2",
    "shardwise.commands.train",
    "datasets",
    "torch.utils.tensorboard",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "gpt_neox", "llama", "bloom", "falcon", "t5")),
)
CLOSE_SECONDS = 20.0  # for idle workers to end by themselves
GRACE_SECONDS = 10.0  # what is left for the others once a rank has failed
CONNECT_SECONDS = 120.0  # for a worker's one connection to the store, which may wait for name servers
DUMP_SECONDS = 2.0  # how long a hanging rank gets to write its traceback


class WorldError(AssertionError):
    """A run of a world failed. `reports` maps each failing rank to its `RankOutcome`; `first` is where it began."""

    def __init__(self, name: str, world_size: int, reports: dict[int, RankOutcome]) -> None:
        self.reports = reports
        order = sorted(reports, key=lambda rank: (reports[rank].when, rank))
        self.first = order[0]
        lines = [f"{name} failed on {len(reports)} of {world_size} ranks, first on rank {self.first}"]
        lines += [f"--- rank {rank} {reports[rank].what}\n{reports[rank].text}" for rank in reversed(order)]
        super().__init__("\n".join(lines))


@dataclass(frozen=True)
class RankOutcome:
    """The outcome of one rank."""

    what: str  # "raised ValueError", "died: SIGKILL", "hangs"
    text: str  # its traceback, as far as there is one
    when: float  # Unix time
    joined: bool = True  # whether it ever was in the group


@dataclass(frozen=True)
class Request:
    """One run, as a worker reads it. The function's module is loaded before the payload is unpickled."""

    number: int
    place: RankEnvironment
    timeout: float
    module: str
    file: str | None
    payload: bytes
    environment: dict[str, str]
    directory: str
    path: list[str]


@dataclass
class Worker:
    """A process of the pool, seen from the test."""

    process: Any
    connection: Connection
    dump: Path  # where faulthandler writes

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()
        self.dump.unlink(missing_ok=True)


@dataclass
class WorldPool:
    """`with WorldPool() as pool: pool.run(4, function, argument)` -> the results of ranks 0 to 3."""

    limit: int = 8
    timeout: float = 120.0
    initializer: Callable[[], None] | None = None  # a module-level function that each worker calls first
    preload: tuple[str, ...] = PRELOAD
    start_method: str = (
        "forkserver"  # "spawn" for functions that use CUDA: a fork of a process that asked for it has none
    )
    _workers: list[Worker] = field(default_factory=list, init=False)
    _runs: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._context: Any = multiprocessing.get_context(self.start_method)
        self._context.set_forkserver_preload(list(self.preload))
        self._directory = tempfile.TemporaryDirectory(prefix="shardwise-worlds-")
        self._store = loopback.serve_store()
        atexit.register(self.close)  # before multiprocessing waits for children that wait for us

    def __enter__(self) -> WorldPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends every worker. The fork server ends with this process."""
        atexit.unregister(self.close)
        for worker in self._workers:
            worker.connection.close()
        end = time.monotonic() + CLOSE_SECONDS
        for worker in self._workers:
            worker.process.join(max(0.0, end - time.monotonic()))
        for worker in self._workers:
            worker.kill()
        self._workers.clear()
        self._directory.cleanup()

    @property
    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers]

    def run(self, world_size: int, function: Callable[..., Any], *args: Any, timeout: float | None = None) -> list[Any]:
        """Calls the module-level `function(*args)` on every rank of a new world; its results by rank."""
        if not 1 <= world_size <= self.limit:
            raise ValueError(f"world_size={world_size} is outside of this pool; use 1 to {self.limit}")
        self._grow(world_size)
        self._runs += 1
        workers = dict(enumerate(self._workers[:world_size]))
        try:
            self._send(workers, function, args, timeout or self.timeout)
            reports, results = self._receive(workers, timeout or self.timeout)
        except BaseException:  # pytest's own timeout, Ctrl-C: nobody will read these workers' answers
            self._discard(workers.values())
            raise
        if reports:
            raise WorldError(getattr(function, "__name__", repr(function)), world_size, reports)
        return [results[rank] for rank in range(world_size)]

    def _grow(self, size: int) -> None:
        self._discard([worker for worker in self._workers if not worker.process.is_alive()])
        while len(self._workers) < size:
            ours, theirs = self._context.Pipe()
            handle, name = tempfile.mkstemp(dir=self._directory.name)
            os.close(handle)
            process = self._context.Process(target=_serve, args=(theirs, name, self.initializer))
            process.start()
            theirs.close()
            self._workers.append(Worker(process, ours, Path(name)))

    def _discard(self, workers: Iterable[Worker]) -> None:
        for worker in list(workers):
            worker.kill()
            self._workers.remove(worker)

    def _send(self, workers: dict[int, Worker], function: Callable[..., Any], args: Any, timeout: float) -> None:
        payload = pickle.dumps((function, args))
        module = function.__module__
        file = getattr(sys.modules.get(module), "__file__", None)
        for rank, worker in workers.items():
            place = RankEnvironment(
                rank, len(workers), rank, len(workers), loopback.ADDRESS, self._store.port, "WorldPool"
            )
            environment, directory = dict(os.environ), os.getcwd()
            request = Request(self._runs, place, timeout, module, file, payload, environment, directory, list(sys.path))
            worker.connection.send_bytes(pickle.dumps(request))

    def _receive(self, workers: dict[int, Worker], timeout: float) -> tuple[dict[int, RankOutcome], dict[int, Any]]:
        """Reads every rank's answer; a rank without one is dead or, when time is up, hangs."""
        pending, results = dict(workers), {}
        reports: dict[int, RankOutcome] = {}
        deadline = time.monotonic() + timeout
        while pending and (left := deadline - time.monotonic()) > 0:
            ready = wait([end for w in pending.values() for end in (w.connection, w.process.sentinel)], left)
            for rank, worker in list(pending.items()):
                if worker.connection in ready or worker.process.sentinel in ready:
                    answer = _answer(worker)
                    if isinstance(answer, RankOutcome):
                        reports[rank] = answer
                        deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
                    else:
                        results[rank] = pickle.loads(answer)
                    del pending[rank]
        reports |= _dump_hanging(pending)
        out = {rank for rank, report in reports.items() if not report.joined} | pending.keys()
        self._discard([w for rank, w in workers.items() if rank in out or not w.process.is_alive()])
        return reports, results


def _answer(worker: Worker) -> RankOutcome | bytes:
    try:
        kind, content = pickle.loads(worker.connection.recv_bytes())
    except (EOFError, OSError):
        worker.process.join()
        return RankOutcome(f"died: {_how(worker.process.exitcode)}", worker.dump.read_text(), time.time())
    return RankOutcome(*content) if kind == "error" else content


def _how(exit_code: int) -> str:
    return signal.Signals(-exit_code).name if exit_code < 0 else f"exit code {exit_code}"


def _dump_hanging(workers: dict[int, Worker]) -> dict[int, RankOutcome]:
    """Each hanging rank's Python stack, which faulthandler writes even while the rank waits inside C."""
    for worker in workers.values():
        os.kill(worker.process.pid, signal.SIGUSR1)
    end = time.monotonic() + DUMP_SECONDS
    while time.monotonic() < end and not all(worker.dump.stat().st_size for worker in workers.values()):
        time.sleep(0.02)
    if workers:
        time.sleep(0.1)  # a traceback is written in many small pieces
    return {rank: RankOutcome("hangs", worker.dump.read_text(), time.time()) for rank, worker in workers.items()}


# ---- in the worker


def _serve(connection: Connection, dump: str, initializer: Callable[[], None] | None) -> None:
    """A worker's life: one request after the other, until the pool hangs up."""
    loopback.die_with_parent()
    stream = open(dump, "w")  # noqa: SIM115 - faulthandler needs it for as long as this process lives
    faulthandler.enable(stream)
    faulthandler.register(signal.SIGUSR1, stream, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the test session's to answer
    if initializer is not None:
        initializer()
    while True:
        try:
            request = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            return
        connection.send_bytes(_handle(request))


def _handle(request: Request) -> bytes:
    """Runs the request. Its group stays open until the next one: peers may still read what this rank sent last."""
    _leave()
    joined = False
    try:
        _enter(request)
        joined = True
        _load_module(request)
        function, args = pickle.loads(request.payload)
        answer = pickle.dumps(("result", pickle.dumps(function(*args))))
    except (Exception, SystemExit) as error:
        text = "".join(traceback.format_exception(error)).rstrip()
        answer = pickle.dumps(("error", (f"raised {type(error).__name__}", text, time.time(), joined)))
        traceback.clear_frames(error.__traceback__)  # they hold the group, and peers wait for it to close
        _leave()
    return answer


def _enter(request: Request) -> None:
    """The test's surroundings (environment, directory, import path) and this rank's place in a new group.

    Nobody goes on before everybody is in: a rank that fails at once would else cut off peers that still connect. Torch
    counts such a group on the rank where it failed and looks for its peers under another name from then on, so the
    pool replaces a worker that could not join.
    """
    sys.path[:] = request.path
    os.chdir(request.directory)
    os.environ.clear()
    os.environ.update(request.environment | request.place.variables())
    os.environ["GLOO_SOCKET_IFNAME"] = loopback.interface() or ""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    timeout = 2 * request.timeout  # the pool's comes first: it shows where each rank stands
    store = _store(request.place.master_port)
    store.set_timeout(timedelta(seconds=timeout))
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"run-{request.number}", store),
        rank=request.place.rank,
        world_size=request.place.world_size,
        timeout=timedelta(seconds=timeout),
    )
    dist.barrier()


@functools.cache
def _store(port: int) -> dist.TCPStore:
    """One connection for a worker's life: torch asks a name server about each, for seconds where none answers."""
    return loopback.connect_store(port, CONNECT_SECONDS)


def _load_module(request: Request) -> None:
    """Import the function's module under the name that the test session knows it by, wherever its file lies."""
    if request.module in sys.modules or request.file is None:
        return
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module(request.module)
        return
    spec = importlib.util.spec_from_file_location(request.module, request.file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{request.file} cannot be imported as {request.module}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[request.module] = module
    spec.loader.exec_module(module)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    if groups := sys.modules.get("shardwise._torch_compat.groups"):
        groups.clear_placement_cache()  # groups that it keeps alive take more of the processor with every run
    gc.collect()
    _freeze_imports()


_frozen_modules = 0


def _freeze_imports() -> None:
    """Leave what new modules hold out of later collections, which would take longer than a small run."""
    global _frozen_modules
    if len(sys.modules) > _frozen_modules:
        gc.freeze()
        _frozen_modules = len(sys.modules)
