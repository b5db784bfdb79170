"""The program of a traced rank in a step, as plain data: operators, collectives, copies, waits and reads."""

from __future__ import annotations

from typing import NamedTuple

SEND, RECEIVE = "send", "recv"
POINT_TO_POINT = (SEND, RECEIVE)

Partition = tuple[tuple[int, ...], ...]  # all ranks of the world, group by group

# (kind, its sizes) -> how often: ("product", m, n, k), ("attention", flops forward, positions, size of a head),
# and ("bytes",) -> bytes that all other operators read and write.
Work = dict[tuple[str | int, ...], int]


class Operators(NamedTuple):
    """Operators in a row.

    Attributes:
        phase: "forward", "backward", FSDP2's "gathering" or "reduction" of a unit, or "update".
        launches: kernels that a host launches for them.
        work: what they are.
        memory: bytes alive at their end, by owner in the order of `OWNERS`.
        once: FSDP2 gathers, or reduces, that unit this one time in the step.
    """

    phase: str
    launches: int
    work: Work
    memory: tuple[int, ...] = ()
    once: bool = False

    @property
    def multiplies(self) -> bool:
        """True where matrices are multiplied."""
        return any(kind[0] == "product" for kind in self.work)


class Call(NamedTuple):
    """A collective or a message, as it is issued.

    Attributes:
        number: of this rank's calls, from 0.
        operation: in torch.distributed's words.
        group: the axes along which its ranks lie.
        partition: which of the trace's partitions of all ranks has the group.
        bytes: of the whole tensor.
        unit: whose tensors travel.
        block: the module that issued it, `` where none runs.
        line: of code that issued it.
        peer: of a message, how many places of the group the other rank lies behind this one.
        batch: messages of one batch have the same.
        root: of a broadcast, its place in the group.
        is_apart: it is FSDP2's, which computation waits for where it is used alone.
        on_host: its tensors are in host memory, and the host waits for it.
    """

    number: int
    operation: str
    group: str
    partition: int
    bytes: int
    unit: str
    block: str
    line: str
    peer: int | None = None
    batch: int | None = None
    root: int | None = None
    is_apart: bool = False
    on_host: bool = False

    @property
    def is_message(self) -> bool:
        return self.operation in POINT_TO_POINT

    def __str__(self) -> str:
        unit = f" of {self.unit}" if self.unit else ""
        return f"{self.operation}{unit} over {self.group}, {self.bytes:,} bytes"


class Wait(NamedTuple):
    """Wait for the result of a call, which what follows needs; `at_use` where FSDP2 copies out what it has gathered."""

    number: int
    at_use: bool = False


class Read(NamedTuple):
    """The host waits for a value of the device's."""

    line: str


class Copy(NamedTuple):
    """A copy between the accelerator and its host.

    Attributes:
        bytes: of it.
        to_host: its direction.
        stream: its number; 0 is that of computation.
        number: of its stream's copies, from 1.
        waits: the host waits for it.
    """

    bytes: int
    to_host: bool
    stream: int
    number: int
    waits: bool


class HostWork(NamedTuple):
    """Operators in a row that the host computes, beside the launching host where a thread does."""

    bytes: int
    beside: bool = False


class CopyWait(NamedTuple):
    """Wait for copies: of the host, of its thread, or of a stream.

    Attributes:
        waiter: the stream's number, `HOST_WAITS` or `THREAD_WAITS`.
        streams: (number of a stream, number of its last copy that has to be done).
    """

    waiter: int
    streams: tuple[tuple[int, int], ...]


class Joined(NamedTuple):
    """The host waits for its thread."""


HOST_WAITS, THREAD_WAITS = -1, -2
Entry = Operators | Call | Wait | Read | Copy | HostWork | CopyWait | Joined
