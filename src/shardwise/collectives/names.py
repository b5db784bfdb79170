"""One name for every collective: whose tensors travel, among which ranks, and by which operation.

Messages, checks and traces read it. It is equal on all ranks that take part, so ranks that are out of step are told
apart by their names' digests: the native engine compares them in every collective.

    name = CollectiveName("transformer.h.0", "shard", "reduce_scatter")
    with name:     # an error of torch.distributed inside says which collective failed, and a profiler's trace shows it
        dist.reduce_scatter_tensor(...)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, cached_property
from hashlib import blake2b
from itertools import count
from types import TracebackType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.profiler import record_function

from shardwise.errors import ModelError
from shardwise.job.axes import Axis

ROOT_UNIT = "root"
OUT_OF_STEP = "the ranks are out of step"  # the engine's words where names differ
SAME_ORDER = (
    "A rank may skip blocks, but must run each at most once, in the order in which the module has them; put the blocks "
    "in that order, or let every rank run the same ones"
)
SAME_CALLS = "Let every rank take the same steps, evaluations and saves, and bring equally many microbatches to each"


@dataclass(frozen=True)
class CollectiveName:
    """The name of a collective, and the context in which it runs.

    Attributes:
        unit: whose tensors travel: the module of a sharded unit, a stage, or what a step agrees on.
        group: the axes along which the ranks lie, as the layout describes their group.
        operation: in torch.distributed's words.
    """

    unit: str
    group: str
    operation: str

    def __str__(self) -> str:
        return f"{self.operation} of {self.unit} over {self.group}"

    @cached_property
    def digest(self) -> int:
        """63 bits that differ for different names, equal on every rank."""
        return int.from_bytes(blake2b(str(self).encode(), digest_size=8).digest(), "little") >> 1

    @cached_property
    def label(self) -> str:
        """Return unit and group, for the messages of the engine, which say the operation themselves."""
        return f"{self.unit} over {self.group}"

    @cached_property
    def encoded(self) -> bytes:
        """The name as bytes, for the rank's record."""
        return str(self).encode()

    def __enter__(self) -> CollectiveName:
        _current.enter(self)
        if _trace.on:
            span = record_function(str(self))
            span.__enter__()
            _trace.spans.append(span)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _current.leave()
        if _trace.spans:
            _trace.spans.pop().__exit__(kind, error, traceback)
        if error is not None:
            self.attach(error)
            _raise_out_of_step(error)

    def attach(self, error: BaseException) -> None:
        """Say in an error of torch.distributed that this collective has raised it; the innermost name stays."""
        if is_of_collective(error) and not hasattr(error, "collective_name"):
            error.args = (f"{error.args[0]} (in the {self})", *error.args[1:])
            error.collective_name = self  # type: ignore[attr-defined]


def is_of_collective(error: BaseException) -> bool:
    """Return True for what a backend raises: errors of torch.distributed, and Gloo's, which have no class."""
    if not error.args:
        return False
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and "gloo" in str(error.args[0]).lower())


@contextmanager
def ranks_in_step() -> Iterator[None]:
    """Raise a ModelError where ranks have called collectives of different names, asynchronous ones too."""
    try:
        yield
    except RuntimeError as error:
        _raise_out_of_step(error)
        raise


def _raise_out_of_step(error: BaseException) -> None:
    text = str(error)
    if isinstance(error, dist.DistError) and OUT_OF_STEP in text:
        calls = text[text.index(OUT_OF_STEP) :].splitlines()[0].partition(" (in the ")[0]
        of_units = any(f" over {axis}" in calls for axis in (Axis.SHARD, Axis.REPLICA))
        raise ModelError(f"{calls}. {SAME_ORDER if of_units else SAME_CALLS}") from error


class NameRecord(Protocol):
    """Keeps the names of the collectives that threads are in: the rank's record does."""

    def enter(self, thread: int, name: CollectiveName, outer: CollectiveName | None) -> None: ...
    def leave(self, thread: int, outer: CollectiveName | None) -> None: ...


OTHER_THREADS = 3  # that are told apart, beside the main thread
_others = count()


class _Current(threading.local):
    """Names of the collectives that this thread is in, the innermost last; the engine is told that one.

    Attributes:
        tell: the engine's function, once it is loaded: (digest, label) of the calls that follow.
        record: of this rank, once there is one.
        thread: place of this thread in it; 0 for the main one.
    """

    tell: Callable[[int, str], None] | None = None
    record: NameRecord | None = None

    def __init__(self) -> None:
        self.names: list[CollectiveName] = []
        is_main = threading.current_thread() is threading.main_thread()
        self.thread = 0 if is_main else 1 + next(_others) % OTHER_THREADS

    def enter(self, name: CollectiveName) -> None:
        if self.record is not None:
            self.record.enter(self.thread, name, self.names[-1] if self.names else None)
        self.names.append(name)
        if self.tell is not None:
            self.tell(name.digest, name.label)

    def leave(self) -> None:
        self.names.pop()
        outer = self.names[-1] if self.names else None
        if self.record is not None:
            self.record.leave(self.thread, outer)
        if self.tell is not None:
            self.tell(outer.digest if outer else 0, outer.label if outer else "")


_current = _Current()


def tell_names_to(tell: Callable[[int, str], None]) -> None:
    """Tell (digest, label) of the collective in which a thread is from now on; 0 for none."""
    _Current.tell = staticmethod(tell)  # type: ignore[assignment]


def record_names_in(record: NameRecord | None) -> None:
    """Keep the names of the collectives that threads of this process are in from now on; None: no longer."""
    _Current.record = record


class NamedWork(dist.Work):
    """An asynchronous collective whose `wait` stands under its name."""

    def __init__(self, name: CollectiveName, work: dist.Work) -> None:
        super().__init__()
        self._name, self._work = name, work

    def wait(self, timeout: Any = None) -> bool:
        with self._name:
            return self._work.wait() if timeout is None else self._work.wait(timeout)

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def get_future(self) -> torch.futures.Future[Any]:  # type: ignore[override]
        return self._work.get_future()


def named_work(name: CollectiveName, work: dist.Work | None) -> dist.Work | None:
    """Return the work of an asynchronous collective under its name; None where it was waited for."""
    return None if work is None else NamedWork(name, work)


def current_name() -> AbstractContextManager[Any]:
    """Return the name of the collective in which this thread is, for what another thread does of it."""
    return _current.names[-1] if _current.names else nullcontext()


class _Trace(threading.local):
    """Spans of collectives that this thread is in; `on` is of the process."""

    on = False

    def __init__(self) -> None:
        self.spans: list[record_function] = []


_trace = _Trace()


def trace_collectives(on: bool) -> None:
    """Let traces of torch's profiler show collectives by name from now on, or no longer."""
    _Trace.on = on


@cache
def _named(unit: str, group: str, operation: str) -> CollectiveName:
    return CollectiveName(unit, group, operation)


def collective_name(unit: str, group: dist.ProcessGroup, operation: str) -> AbstractContextManager[Any]:
    """Return the name of a collective over `group`, which is made once; compiled graphs have no place for one."""
    if torch.compiler.is_compiling():
        return nullcontext()
    return _named(unit, group_name(group), operation)


def group_name(group: dist.ProcessGroup) -> str:
    """Return the axes of a group as the layout has described it; `world` for all ranks."""
    return "world" if group is dist.group.WORLD else group.group_desc


def unit_names(root: Any) -> dict[FSDPModule, str]:
    """Return the name of each sharded unit of the module `root`: its module's own, `root` for the root."""
    return {module: name or ROOT_UNIT for name, module in root.named_modules() if isinstance(module, FSDPModule)}
