"""Whole matrices of slices that lie on several ranks, and results back to the slices, by one exchange each way.

Every rank of a stage knows which slices each of the others holds. A matrix is made whole on the ranks that are to work
on it, its owners; they are chosen by work, so that each has about as much to do. What is computed of a whole matrix
depends on no layout, bit by bit.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.collectives.names import collective_name
from shardwise.model.matrices import Matrix, Place
from shardwise.parallel.tensor_map import Region

ROUND_BYTES = 1 << 27  # of whole matrices that a rank holds at once
UNIT = "momentum of matrices"
Holdings = Mapping[str, Sequence[Region]]  # parameter -> what of it a rank holds


class Task(NamedTuple):
    """A matrix of a parameter, numbered, and how much work it is.

    Attributes:
        everywhere: every rank that holds a slice works on it; else one of them.
    """

    number: int
    name: str
    matrix: Matrix
    work: float
    everywhere: bool = False


class Message(NamedTuple):
    """A part of a task's matrix on its way between two ranks; `place` is where the slice has it, at one of its ends."""

    task: Task
    source: int
    target: int
    place: Place

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        rows, columns = self.place.inside
        return rows.stop - rows.start, columns.stop - columns.start


@dataclass
class Round:
    """Matrices that are exchanged together, as one rank sees them.

    Attributes:
        own: tasks that this rank works on, each with its parts in this rank's own slices.
        inbound: parts of slices on their way to owners, from or to this rank.
        outbound: results on their way to slices, from or to this rank.
        travels: some rank sends a part to another one.
    """

    own: list[tuple[Task, list[Place]]] = field(default_factory=list)
    inbound: list[Message] = field(default_factory=list)
    outbound: list[Message] = field(default_factory=list)
    travels: bool = False


class MatrixExchange:
    """Exchanges parts of matrices over the ranks of `group`; without one this rank holds everything.

    Args:
        holdings: by rank of the group, what each holds.
        dtype, device: of whole matrices.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        holdings: Sequence[Holdings],
        tasks: Iterable[Task],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.group, self.rank, self.dtype, self.device = group, 0 if group is None else group.rank(), dtype, device
        self.rounds = [Round()]
        self._load, self._filled = [0.0] * len(holdings), [0] * len(holdings)
        for task in sorted(tasks, key=lambda task: -task.work):
            self._assign(task, [_places(task, regions) for regions in holdings])

    def run(
        self, slices: Mapping[str, Tensor], work: Callable[[Tensor], Tensor]
    ) -> Iterator[tuple[Task, Place, Tensor]]:
        """Yield what `work` makes of each matrix, as far as this rank's slices hold it. Collective, to its end.

        Args:
            slices: of every parameter of which this rank holds something, laid out as its local tensor.
        """
        for at in self.rounds:
            parts: dict[int, list[tuple[Place, Tensor]]] = defaultdict(list)
            for message, part in self._moved(at, at.inbound, lambda m: slices[m.task.name][m.place.local]):
                parts[message.task.number].append((message.place, part))
            results: dict[int, Tensor] = {}
            for task, own in at.own:
                local = [(place, slices[task.name][place.local]) for place in own]
                result = results[task.number] = work(self._whole(task, [*local, *parts.pop(task.number, [])]))
                yield from ((task, place, result[place.inside]) for place in own)
            sent = self._moved(at, at.outbound, lambda m: results[m.task.number][m.place.inside])  # noqa: B023
            yield from ((message.task, message.place, part) for message, part in sent)

    def _whole(self, task: Task, parts: Sequence[tuple[Place, Tensor]]) -> Tensor:
        whole = torch.empty(task.matrix.shape, dtype=self.dtype, device=self.device)
        for place, part in parts:
            box = whole[place.inside]
            box.copy_(part.reshape(box.shape))
        return whole

    def _moved(
        self, at: Round, messages: Sequence[Message], read: Callable[[Message], Tensor]
    ) -> list[tuple[Message, Tensor]]:
        """Send this rank's messages and return those that have come for it."""
        if not at.travels:
            return []
        assert self.group is not None
        ranks = range(self.group.size())
        leaving = [m for target in ranks for m in messages if m.source == self.rank and m.target == target]
        coming = [m for source in ranks for m in messages if m.target == self.rank and m.source == source]
        sizes, received = ([math.prod(m.shape) for m in some] for some in (leaving, coming))
        out = torch.empty(sum(sizes), dtype=self.dtype, device=self.device)
        for message, box in zip(leaving, out.split(sizes), strict=True):
            box.copy_(read(message).reshape(-1))
        into = torch.empty(sum(received), dtype=self.dtype, device=self.device)
        by_target = [sum(math.prod(m.shape) for m in leaving if m.target == rank) for rank in ranks]
        by_source = [sum(math.prod(m.shape) for m in coming if m.source == rank) for rank in ranks]
        with collective_name(UNIT, self.group, "all_to_all_single"):
            dist.all_to_all_single(into, out, by_source, by_target, group=self.group)
        parts = (part.view(m.shape) for m, part in zip(coming, into.split(received), strict=True))
        return list(zip(coming, parts, strict=True))

    def _assign(self, task: Task, places: Sequence[Sequence[Place]]) -> None:
        """Choose the owners of a task, and add its messages to the round."""
        holders = [rank for rank, own in enumerate(places) if own]
        _check_whole(task, places)
        owners = holders if task.everywhere else [min(holders, key=lambda rank: (self._load[rank], rank))]
        size = math.prod(task.matrix.shape) * self.dtype.itemsize
        if any(self._filled[owner] and self._filled[owner] + size > ROUND_BYTES for owner in owners):
            self.rounds.append(Round())
            self._filled = [0] * len(self._filled)
        at = self.rounds[-1]
        for owner in owners:
            self._load[owner] += task.work
            self._filled[owner] += size
            if owner == self.rank:
                at.own.append((task, list(places[owner])))
            inbound = [Message(task, source, owner, place) for source, place in _sources(places, owner)]
            outbound = [Message(task, owner, rank, place) for rank in holders for place in places[rank]]
            outbound = [] if task.everywhere else [message for message in outbound if message.target != owner]
            at.travels = at.travels or bool(inbound or outbound)
            at.inbound += [message for message in inbound if self.rank in (message.source, message.target)]
            at.outbound += [message for message in outbound if self.rank in (message.source, message.target)]


def _places(task: Task, holdings: Holdings) -> list[Place]:
    regions = holdings.get(task.name, ())
    return [place for region in regions for place in task.matrix.places(region.logical, region.local)]


def _sources(places: Sequence[Sequence[Place]], owner: int) -> Iterator[tuple[int, Place]]:
    """Yield (rank, place) of every part that the owner lacks, from the nearest of the ranks that hold it."""
    known = {_key(place) for place in places[owner]}
    for rank in sorted(range(len(places)), key=lambda rank: (abs(rank - owner), rank)):
        for place in places[rank]:
            if _key(place) not in known:
                known.add(_key(place))
                yield rank, place


def _key(place: Place) -> tuple[int, ...]:
    return tuple(bound for part in place.inside for bound in (part.start, part.stop))


def _check_whole(task: Task, places: Sequence[Sequence[Place]]) -> None:
    """Raise RuntimeError where the parts of all ranks do not make up the matrix, or overlap."""
    boxes = {_key(place) for own in places for place in own}
    elements = sum((bottom - top) * (right - left) for top, bottom, left, right in boxes)
    if elements != math.prod(task.matrix.shape):
        raise RuntimeError(f"the ranks hold {elements} of {math.prod(task.matrix.shape)} elements of {task.name}")
