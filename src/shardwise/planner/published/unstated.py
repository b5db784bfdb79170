"""Settings that a published run leaves unstated: the size of its microbatch, and activation checkpointing.

Who publishes a run has tuned it. So what is not stated is what is predicted to be quickest of what fits. In a pipeline
a microbatch has one sequence, and there are as many as the batch gives. These are guesses that leave a row mapped;
nothing here looks at what was measured.
"""

from __future__ import annotations

from dataclasses import replace

from shardwise.planner.formulas.footprint import footprint
from shardwise.planner.formulas.predict import seconds_by_cause
from shardwise.planner.formulas.prediction import TrainingConfiguration

MICROBATCHES = (1, 2, 4, 8, 16, 32, 64)
# Ways to checkpoint that are tried, and the shares of the blocks that do.
CHECKPOINTED = (("none", 1.0), ("selective", 1.0), ("full", 0.25), ("full", 0.5), ("full", 0.75), ("full", 1.0))


def fits(given: TrainingConfiguration) -> bool:
    """Return whether every stage is predicted to fit."""
    return max(footprint(given)[1]) <= given.cluster.accelerator.memory_bytes


def with_microbatch(
    given: TrainingConfiguration, sequences: int | None, accumulation: int | None, checkpointing_open: bool = False
) -> TrainingConfiguration:
    """`given` with the quickest microbatch that fits, or in a pipeline with one of one sequence.

    Args:
        given: with any microbatch.
        sequences: of a step on one data rank, as far as that is stated; a microbatch divides it.
        accumulation: microbatches of a step, likewise. Where neither is stated there are twice as many as stages, which
            fill any schedule, or one without a pipeline.
        checkpointing_open: each size has the quickest checkpointing with which it fits.
    """
    usual = accumulation or (2 * given.pipeline if given.pipeline > 1 else 1)
    sizes = [size for size in MICROBATCHES if sequences is None or sequences % size == 0]
    if given.pipeline > 1:
        sizes = sizes[:1]
    ways = [replace(given, microbatch=size, accumulation=sequences // size if sequences else usual) for size in sizes]
    if checkpointing_open:
        ways = [with_checkpointing(way) for way in ways]
    return _quickest(ways) or ways[0]


def with_checkpointing(given: TrainingConfiguration) -> TrainingConfiguration:
    """`given` with the quickest checkpointing with which it fits, or where none does with that of every block."""
    ways = [replace(given, checkpointing=kind, checkpointed=share) for kind, share in CHECKPOINTED]
    return _quickest(ways) or ways[-1]


def _quickest(ways: list[TrainingConfiguration]) -> TrainingConfiguration | None:
    """Return the quickest of those that fit; None where none does."""
    fitting = [way for way in ways if fits(way)]
    return max(fitting, key=lambda way: way.tokens / sum(seconds_by_cause(way).values())) if fitting else None
