"""Worker groups that stay alive while others run, interleaved rounds over them, and the statistics of the rounds.

A contender is a group of processes, one a rank, built once. Between its turns a group waits on a pipe, which costs no
CPU; how much the waiting groups did use is measured and reported. In a turn the ranks meet at a barrier, run n steps,
meet again, and the slowest rank's time counts. Every round gives each contender one turn, so that a slow minute of the
machine hits all of them; the order rotates from round to round.
"""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
import os
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from shardwise.collectives import registration

START_METHOD = "spawn"  # a fresh interpreter, so that a contender sees no package that another has imported
Step = Callable[[], torch.Tensor]  # one optimizer step; returns the loss (of the rank, or of all ranks)


@dataclass(frozen=True)
class Contender:
    """One program under test: `build` is `module:function(workload, directory, rank, world) -> Step`."""

    name: str
    build: str
    package: str  # what must be importable
    settings: str = ""  # what it runs with, for the record
    backend: str = "gloo"  # of the ranks' group

    def missing(self) -> str | None:
        """Why it cannot take part, or None."""
        if importlib.util.find_spec(self.package) is None:
            return f"{self.package} is not installed"
        return None


class GroupFailed(RuntimeError):
    """A rank of a contender raised, died or did not answer in time."""


@dataclass
class Turn:
    """What one turn of a group measured: the slowest rank's seconds and the mean loss of each step."""

    seconds: float
    losses: list[float]


class WorkerGroup:
    """The processes of one contender. Started once; idle (blocked on a pipe) between turns."""

    def __init__(self, contender: Contender, arguments: tuple[Any, ...], ranks: int, threads: int) -> None:
        self.contender = contender
        self.scratch = tempfile.TemporaryDirectory(prefix="shardwise-bench-")
        context = multiprocessing.get_context(START_METHOD)
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            job = _WorkerJob(contender, arguments, rank, ranks, threads, self.scratch.name)
            process = context.Process(target=_serve, args=(theirs, job), daemon=True)
            with environment(OMP_NUM_THREADS=str(threads)):
                process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def ready(self, timeout: float = 900.0) -> None:
        """Wait until every rank has built its step (a peer may compile its kernels here)."""
        self._gather(timeout)

    def run(self, steps: int, timeout: float = 600.0) -> Turn:
        """One turn of `steps` steps."""
        for pipe in self.pipes:
            pipe.send(steps)
        answers = self._gather(timeout)
        return Turn(max(seconds for seconds, _ in answers), answers[0][1])

    def cpu_seconds(self) -> float:
        """CPU time used so far by all ranks."""
        times = [psutil.Process(process.pid).cpu_times() for process in self.processes if process.is_alive()]
        return sum(t.user + t.system for t in times)

    def close(self) -> None:
        """End the processes; those that do not end by themselves are killed."""
        for pipe in self.pipes:
            with suppress(OSError):
                pipe.send(None)
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self.pipes:
            pipe.close()
        self.scratch.cleanup()

    def _gather(self, timeout: float) -> list[Any]:
        """One answer of each rank; the first error, death or silence fails the group."""
        deadline = time.monotonic() + timeout
        answers: dict[int, Any] = {}
        while len(answers) < len(self.pipes):
            pending = [rank for rank in range(len(self.pipes)) if rank not in answers]
            found = wait([self.pipes[rank] for rank in pending], max(0.0, deadline - time.monotonic()))
            if not found:
                raise GroupFailed(f"{self.contender.name}: ranks {pending} did not answer in {timeout:.0f} s")
            for rank in pending:
                if self.pipes[rank] in found:
                    answers[rank] = self._receive(rank)
        return [answers[rank] for rank in range(len(self.pipes))]

    def _receive(self, rank: int) -> Any:
        try:
            kind, value = self.pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            raise self._death(rank) from None
        if kind == "error":
            for other in range(len(self.pipes)):
                if other != rank and self._is_dead(other):  # what a dead rank's peers raise is its consequence
                    raise self._death(other)
            raise GroupFailed(f"{self.contender.name}: rank {rank} raised\n{value}")
        return value

    def _is_dead(self, rank: int) -> bool:
        """Wait a moment for the rank's answer; a pipe that is closed instead says that it died."""
        pipe = self.pipes[rank]
        try:
            if pipe.poll(1.0):
                pipe.recv()
        except (EOFError, ConnectionResetError):
            return True
        return False

    def _death(self, rank: int) -> GroupFailed:
        self.processes[rank].join(5)
        code = self.processes[rank].exitcode
        return GroupFailed(f"{self.contender.name}: rank {rank} died (exit code {code})\n{self._log(rank)}")

    def _log(self, rank: int, lines: int = 15) -> str:
        path = Path(self.scratch.name) / f"rank{rank}.log"
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else ""


@dataclass(frozen=True)
class _WorkerJob:
    contender: Contender
    arguments: tuple[Any, ...]
    rank: int
    world: int
    threads: int
    scratch: str


def _serve(pipe: Connection, job: _WorkerJob) -> None:
    """A rank's life: build the step, then run as many steps as the pipe asks for, until it says None or closes."""
    redirect_output(Path(job.scratch) / f"rank{job.rank}.log")
    try:
        step = _build(job)
        pipe.send(("ready", None))
        while (steps := pipe.recv()) is not None:
            pipe.send(("turn", take_turn(step, steps)))
    except EOFError:  # the parent is gone
        pass
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
        os._exit(1)  # no teardown: exit hooks would wait for ranks that are still in a collective


def _build(job: _WorkerJob) -> Step:
    os.environ.update(
        RANK=str(job.rank),
        LOCAL_RANK=str(job.rank),
        WORLD_SIZE=str(job.world),
        LOCAL_WORLD_SIZE=str(job.world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",  # read by libraries, used by none: the group below is made from a file
    )
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(job.threads)
    store = f"file://{Path(job.scratch) / 'store'}"
    if job.contender.backend == registration.BACKEND:
        registration.register()
    dist.init_process_group(job.contender.backend, init_method=store, rank=job.rank, world_size=job.world)
    return build_step(job.contender, job.arguments, job.rank, job.world)


def build_step(contender: Contender, arguments: tuple[Any, ...], rank: int, world: int) -> Step:
    """What `contender.build` names, called; the group must exist."""
    module, function = contender.build.split(":")
    step: Step = getattr(importlib.import_module(module), function)(*arguments, rank, world)
    return step


def take_turn(step: Step, steps: int) -> tuple[float, list[float]]:
    """Seconds of `steps` steps between two barriers, and the loss of each, averaged over the ranks."""
    dist.barrier()
    start = time.perf_counter()
    losses = [step() for _ in range(steps)]
    dist.barrier()
    seconds = time.perf_counter() - start
    mean = torch.stack([loss.detach().double().reshape(()).cpu() for loss in losses])
    dist.all_reduce(mean)
    return seconds, (mean / dist.get_world_size()).tolist()


@dataclass
class Series:
    """All that was measured of one contender: seconds of each round's turn, every loss, or why there are none."""

    contender: Contender
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)  # of all its ranks together
    losses: list[float] = field(default_factory=list)
    skipped: str | None = None
    idle_cpu_seconds: float = 0.0  # used while others ran
    idle_seconds: float = 0.0  # how long others ran

    @property
    def idle_share(self) -> float:
        """Share of one core that its ranks used while they should have waited."""
        return self.idle_cpu_seconds / self.idle_seconds if self.idle_seconds else 0.0


def start_groups(
    contenders: Sequence[Contender], arguments: tuple[Any, ...], ranks: int, threads: int, say: Callable[[str], None]
) -> tuple[dict[str, WorkerGroup], list[Series]]:
    """Start the groups one after the other; one that cannot run is skipped with its reason."""
    groups: dict[str, WorkerGroup] = {}
    series = [Series(contender, skipped=contender.missing()) for contender in contenders]
    for entry in series:
        if entry.skipped:
            continue
        say(f"{ranks} ranks: starting {entry.contender.name}")
        group = WorkerGroup(entry.contender, arguments, ranks, threads)
        try:
            group.ready()
            groups[entry.contender.name] = group
        except GroupFailed as error:
            entry.skipped = str(error)
            group.close()
        except BaseException:
            group.close()
            raise
    return groups, series


def run_rounds(
    groups: dict[str, WorkerGroup],
    series: list[Series],
    warmup: int,
    rounds: int,
    steps: int,
    between: Callable[[int], None],
) -> None:
    """Warm every group up, then `rounds` rounds of one turn each; `between(round)` runs before each round."""
    entries = [entry for entry in series if not entry.skipped]
    for entry in entries:
        _take(groups, entry, warmup, timed=False)
    for number in range(rounds):
        between(number)
        shift = number % max(1, len(entries))
        for entry in entries[shift:] + entries[:shift]:
            if entry.skipped:
                continue
            with _watched(groups, [other for other in entries if other is not entry and not other.skipped]):
                _take(groups, entry, steps, timed=True)


def _take(groups: dict[str, WorkerGroup], entry: Series, steps: int, timed: bool) -> None:
    """One turn of one group."""
    name = entry.contender.name
    before = groups[name].cpu_seconds()
    try:
        turn = groups[name].run(steps)
    except GroupFailed as error:
        entry.skipped = str(error)
        groups.pop(name).close()
        return
    entry.losses += turn.losses
    if timed:
        entry.seconds.append(turn.seconds)
        entry.cpu_seconds.append(groups[name].cpu_seconds() - before)


@contextmanager
def _watched(groups: dict[str, WorkerGroup], waiting: list[Series]) -> Iterator[None]:
    """Account to the waiting contenders what CPU time they use inside."""
    before = {entry.contender.name: groups[entry.contender.name].cpu_seconds() for entry in waiting}
    start = time.perf_counter()
    yield
    for entry in waiting:
        entry.idle_cpu_seconds += groups[entry.contender.name].cpu_seconds() - before[entry.contender.name]
        entry.idle_seconds += time.perf_counter() - start


@dataclass(frozen=True)
class Summary:
    """Median and quartiles of a list of numbers."""

    median: float
    low: float
    high: float


def summarize(values: Sequence[float]) -> Summary:
    """Median and quartiles; with fewer than two values all three are the same."""
    if len(values) < 2:
        return Summary(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Summary(median, low, high)


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Summary:
    """Speed of ours over theirs, round by round (from seconds, so theirs over ours): noise of a round cancels."""
    return summarize([b / a for a, b in zip(ours, theirs, strict=True)])


def agree(values: Iterable[float], tolerance: float) -> bool:
    """Whether no two of `values` are further apart than `tolerance`; a nan agrees with nothing, not even itself."""
    values = list(values)
    return all(abs(a - b) <= tolerance for a in values for b in values)


def redirect_output(path: Path) -> None:
    """Everything a worker or its libraries print goes to its log; the table stays readable."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)


@contextmanager
def environment(**values: str) -> Iterator[None]:
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value
