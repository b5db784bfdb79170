"""Refitting what a software stack holds in memory besides the count of `footprint.py`, from rows that were measured.

Of a stack with enough rows that have memory: which of the ways to make a loss it uses, by trying each, and the factor
on activations, the bytes of a second gradient, the constant and the share of partial results that are pending, by
linear least squares around the default's values. Measured is the first rank, which trainers log.
Of one without: every row ran, so it had to fit; where too few do with a loss in eager mode, the loss is a fused
kernel's.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from shardwise.planner.formulas.footprint import footprint, stage_footprints
from shardwise.planner.formulas.prediction import Stack, TrainingConfiguration

LEAST_ROWS = 10  # with memory; fewer leave the default's constants
ROUNDS = 12
TOLERANCE = 0.1  # relative error at which a row's weight is halved
LOSSES = (12.0, 4.0)  # bytes of a logit: in eager mode, fused
RAN = 0.95  # share of the rows that have to fit for the loss to be in eager mode
LEAST_SPREAD = 0.03  # of memory
FACTORS = ("activations", "gradient_copy", "memory_gb", "pending")
NEAR = np.array([1.0, 0.0, 1.0, 0.0])  # the factors before anything was measured, and how far they usually are from it
SD = np.array([0.5, 2.0, 1.0, 1.0])


class Held(NamedTuple):
    """A configuration that ran, and the bytes it held, where they were measured."""

    configuration: TrainingConfiguration
    size: float | None


def fit_memory(given: Sequence[Held], stack: Stack) -> Stack:
    """`stack` with the memory constants that its rows give."""
    measured = [row for row in given if row.size is not None]
    if len(measured) < LEAST_ROWS:
        return replace(stack, logit_bytes=_loss_that_fits(given, stack)) if given else stack
    tried = (_fitted(measured, replace(stack, logit_bytes=size)) for size in LOSSES)
    return min(tried, key=lambda constants: constants.memory_spread)


def _loss_that_fits(given: Sequence[Held], stack: Stack) -> float:
    for size in LOSSES:
        ways = [replace(row.configuration, stack=replace(stack, logit_bytes=size)) for row in given]
        fits = [max(footprint(way)[1]) <= way.cluster.accelerator.memory_bytes for way in ways]
        if sum(fits) >= RAN * len(fits):
            return size
    return LOSSES[0]


def _fitted(rows: Sequence[Held], stack: Stack) -> Stack:
    zero = replace(stack, **dict.fromkeys(FACTORS, 0.0))  # type: ignore[arg-type]
    truth, base = np.array([row.size for row in rows]), _first(rows, zero)
    ones = (replace(zero, **{name: 1.0}) for name in FACTORS)  # type: ignore[arg-type]
    columns = np.stack([_first(rows, one) - base for one in ones], axis=1)
    at = NEAR
    for _ in range(ROUNDS):
        error = (base + columns @ at) / truth - 1
        weight = 1 / truth / np.sqrt(1 + (error / TOLERANCE) ** 2) / TOLERANCE
        left = np.vstack([columns * weight[:, None], np.diag(1 / SD)])
        at = np.linalg.lstsq(left, np.concatenate([(truth - base) * weight, NEAR / SD]), rcond=None)[0]
    fitted = replace(stack, **{name: max(0.0, float(value)) for name, value in zip(FACTORS, at)})  # type: ignore[arg-type]
    usual = float(statistics.median(_errors(rows, fitted)))
    return replace(fitted, memory_spread=max(LEAST_SPREAD, 1.48 * usual))


def _errors(rows: Sequence[Held], stack: Stack) -> list[float]:
    return [abs(np.log(size / row.size)) for size, row in zip(_first(rows, stack), rows) if row.size]


def _first(rows: Sequence[Held], stack: Stack) -> np.ndarray:
    """Bytes of each row's first rank under `stack`."""
    return np.array([sum(stage_footprints(replace(row.configuration, stack=stack))[0].values()) for row in rows])
