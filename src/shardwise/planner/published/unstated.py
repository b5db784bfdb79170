"""Settings that a published run leaves unstated: the size of its microbatch, and activation checkpointing.

Who publishes a run has tuned it. So a microbatch that is not stated is the one predicted to be quickest of those that
fit, and activations are checkpointed where the run does not fit without. Both are guesses that leave a row mapped;
nothing here looks at what was measured.
"""

from __future__ import annotations

from dataclasses import replace

from shardwise.planner.formulas.footprint import footprint
from shardwise.planner.formulas.predict import predict
from shardwise.planner.formulas.prediction import TrainingConfiguration

MICROBATCHES = (1, 2, 4, 8, 16, 32, 64)


def fits(given: TrainingConfiguration) -> bool:
    """Return whether every stage is predicted to fit."""
    return max(footprint(given)[1]) <= given.cluster.accelerator.memory_bytes


def with_microbatch(
    given: TrainingConfiguration, sequences: int | None, accumulation: int | None
) -> TrainingConfiguration:
    """`given` with the quickest microbatch that fits.

    Args:
        sequences: of a step on one data rank, as far as that is stated; a microbatch divides it.
        accumulation: microbatches of a step, likewise. Where neither is stated there are twice as many as stages, which
            fill any schedule, or one without a pipeline.
    """
    usual = accumulation or (2 * given.pipeline if given.pipeline > 1 else 1)
    sizes = [size for size in MICROBATCHES if sequences is None or sequences % size == 0]
    ways = [replace(given, microbatch=size, accumulation=sequences // size if sequences else usual) for size in sizes]
    return max([way for way in ways if fits(way)] or ways[:1], key=lambda way: predict(way).tokens_per_second)


def with_checkpointing(given: TrainingConfiguration) -> TrainingConfiguration:
    """`given`, with every block checkpointed where it does not fit otherwise."""
    return given if fits(given) else replace(given, checkpointing="full", checkpointed=1.0)
