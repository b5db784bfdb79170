"""The axes along which ranks work together, and one record of what every room may know of an axis.

Layout, plan, rules, planner and doctor read these records. What only a higher room knows of an axis (its rules, its
traffic, its transform) stands in that room, in a table keyed by `Axis`; a test holds that each table has every axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from shardwise.job.schema import Job


class Axis(StrEnum):
    """A mesh axis. Its value is its name in JSON, manifests and messages."""

    REPLICA = "replica"
    SHARD = "shard"
    CONTEXT = "context"
    TENSOR = "tensor"
    PIPELINE = "pipeline"
    EXPERT = "expert"


@dataclass(frozen=True, eq=False)
class AxisSpec:
    """One axis of the layout; two are the same only where they are one object.

    Attributes:
        axis: its name.
        placement_letter: the letter of `placement_strategy` that places it: D (data), P (pipeline) or T (tensor); empty
            for a second view of ranks that other axes place.
        degree_key: the key of the job that sets its degree; empty for an axis that takes the ranks that are left.
        degree: the degree that a job asks for; None where the job leaves it open.
        shards_state: its ranks hold different parts of parameters, gradients and optimizer state.
        reads_own_rows: its ranks read different rows of a batch.
    """

    axis: Axis
    placement_letter: str
    degree_key: str
    degree: Callable[[Job], int | None]
    shards_state: bool
    reads_own_rows: bool

    @property
    def is_second_view(self) -> bool:
        """True for an axis of ranks that other axes place: its degree is no factor of the number of ranks."""
        return not self.placement_letter


def _shard_degree(job: Job) -> int | None:
    """Return the ranks of `sharded_data_parallel_degree` without those of other axes, which it counts too."""
    asked = job.parallel.sharded_data_parallel_degree
    if job.parallel.shard_optimizer_state or asked is None:
        return None
    others = (spec_of(axis) for axis in state_axes() if axis != Axis.SHARD)
    return asked // math.prod(spec.degree(job) or 1 for spec in others)


# In the order of the ranks inside one letter, the last varying fastest.
# fmt: off
AXES = (
    AxisSpec(Axis.REPLICA, "D", "", lambda job: None, shards_state=False, reads_own_rows=True),
    AxisSpec(Axis.SHARD, "D", "parallel.sharded_data_parallel_degree", _shard_degree,
             shards_state=True, reads_own_rows=True),
    AxisSpec(Axis.CONTEXT, "D", "parallel.context_parallel_degree", lambda job: job.parallel.context_parallel_degree,
             shards_state=True, reads_own_rows=False),
    AxisSpec(Axis.TENSOR, "T", "parallel.tensor_parallel_degree", lambda job: job.parallel.tensor_parallel_degree,
             shards_state=True, reads_own_rows=False),
    AxisSpec(Axis.PIPELINE, "P", "parallel.pipeline_parallel_degree",
             lambda job: job.parallel.pipeline_parallel_degree, shards_state=True, reads_own_rows=False),
    AxisSpec(Axis.EXPERT, "", "parallel.expert_parallel_degree", lambda job: job.parallel.expert_parallel_degree,
             shards_state=True, reads_own_rows=True),
)
# fmt: on
DATA_LETTER = "D"  # SMP's reduced data parallel
PLACEMENT_LETTERS = "DPT"


def spec_of(axis: Axis) -> AxisSpec:
    """Return the record of `axis`."""
    return next(spec for spec in AXES if spec.axis == axis)


def placed_axes(letters: str) -> tuple[Axis, ...]:
    """Return the axes that these letters of a placement stand for, the last varying fastest with the rank."""
    return _placed(AXES, letters)


def data_axes() -> tuple[Axis, ...]:
    """Return the axes of SMP's D. Ranks that differ along them alone hold the same part of the model's modules."""
    return placed_axes(DATA_LETTER)


def state_axes() -> tuple[Axis, ...]:
    """Return the data axes over which parameters, gradients and optimizer state are sharded."""
    return _data(AXES, True)


def replica_axes() -> tuple[Axis, ...]:
    """Return the data axes whose ranks hold copies of the same shards."""
    return _data(AXES, False)


@cache
def _placed(specs: tuple[AxisSpec, ...], letters: str) -> tuple[Axis, ...]:
    return tuple(spec.axis for letter in letters for spec in specs if spec.placement_letter == letter)


@cache
def _data(specs: tuple[AxisSpec, ...], shards_state: bool) -> tuple[Axis, ...]:
    placed = (spec for spec in specs if spec.placement_letter == DATA_LETTER)
    return tuple(spec.axis for spec in placed if spec.shards_state == shards_state)


def row_axes() -> tuple[Axis, ...]:
    """Return the axes whose ranks read different rows of a batch, the last varying fastest with the row."""
    return tuple(spec.axis for spec in AXES if spec.reads_own_rows and not spec.is_second_view)


def one_copy_axes() -> tuple[Axis, ...]:
    """Return the axes of the ranks that together hold one copy of the parameters."""
    return tuple(axis for axis in placed_axes(PLACEMENT_LETTERS) if spec_of(axis).shards_state)


def second_views() -> tuple[Axis, ...]:
    """Return the axes whose ranks other axes place."""
    return tuple(spec.axis for spec in AXES if spec.is_second_view)


def splitting_specs() -> Iterator[AxisSpec]:
    """Yield the axes whose ranks work on the same rows; the product of their degrees divides the ranks."""
    return (spec for spec in AXES if not spec.reads_own_rows)


def same_rows_ranks(job: Job) -> int:
    """Return how many ranks work together on the same rows."""
    return math.prod(spec.degree(job) or 1 for spec in splitting_specs())


def axis_degrees(job: Job, ranks: int) -> dict[Axis, int]:
    """Return the degree of every axis in a world of `ranks`, which is their product but for second views.

    Ranks that the job gives to no axis go to the last axis that it leaves open: to `shard`, or where that is given to
    `replica`. The job is legal: the given degrees divide `ranks`.
    """
    asked = {spec.axis: spec.degree(job) for spec in AXES}
    degrees = {axis: degree or 1 for axis, degree in asked.items()}
    remainder = [axis for axis, degree in asked.items() if degree is None][-1]
    degrees[remainder] = ranks // math.prod(degree for axis, degree in degrees.items() if axis not in second_views())
    return degrees
