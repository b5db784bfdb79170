"""The kinds of ranks of a job: those of one kind hold and do the same, so that one of them is traced for all.

What a rank does depends on its stage, and may on whether it is first, last or between them among tensor ranks (uneven
shares, the vocabulary's padding). Data ranks differ in what is first and in nothing else: rows, experts and uneven
shares all go to the first before the others. So the first of them is traced at every tensor place, and the last at the
first. Muon's ranks work on other matrices each, which are shared out evenly; their calls are the same but for the sizes
of what each sends.
"""

from __future__ import annotations

from typing import NamedTuple

from shardwise.job.axes import Axis, data_axes
from shardwise.parallel.layout import Layout

FIRST, MIDDLE, LAST = "first", "middle", "last"


class RankKind(NamedTuple):
    """A kind of rank: its pipeline rank, its place among tensor ranks, and whether it is the first of data ranks."""

    stage: int
    tensor: str
    first_of_data: bool


def kind_of_rank(layout: Layout, rank: int) -> RankKind:
    """Return the kind of a rank."""
    coordinates = layout.coordinates(rank)
    index, degree = coordinates[Axis.TENSOR], layout.degrees[Axis.TENSOR]
    tensor = FIRST if index == 0 else LAST if index == degree - 1 else MIDDLE
    first_of_data = tensor != FIRST or not any(coordinates[axis] for axis in data_axes())
    return RankKind(coordinates[Axis.PIPELINE], tensor, first_of_data)


def first_of_stage(kind: RankKind) -> RankKind:
    """Return the kind of the first rank of a kind's pipeline rank."""
    return RankKind(kind.stage, FIRST, True)


def ranks_of_kinds(layout: Layout) -> dict[RankKind, int]:
    """Return kind -> the rank that is traced for it: the first of all that are, or the last of later data ranks."""
    ranks: dict[RankKind, int] = {}
    for rank in range(layout.world_size):
        kind = kind_of_rank(layout, rank)
        if not kind.first_of_data or kind not in ranks:
            ranks[kind] = rank
    return ranks
