"""A stack of which a few rows were measured: its constants, and the spread that a further row has about them.

The constants that most tell stacks apart are fitted on the rows as all are (`calibrate.py`), drawn to what stands
there: a factor on the whole step would scale traffic as products. Of the rate of products, most of a step, the
posterior mean is taken in the end, which says how wide intervals are (`calibrate_spread.probed`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from shardwise.planner.constants.inventory import Constants
from shardwise.planner.formulas.prediction import Stack
from shardwise.planner.published.calibrate import STACK_SD, TOLERANCE, Sample, seen
from shardwise.planner.published.calibrate_solve import RobustSum, minimum
from shardwise.planner.published.calibrate_spread import STRANGER_ROWS, USUAL, USUAL_ROWS, Prior, probed

ADJUSTED = ("matmul", "attention", "overlap", "network", "tensor_exposed")
WEIGHT = 2.0  # of a row: half of that in a fit of many, for one row in three may be odd
WIDTH = 0.02  # of a difference, of logarithms


def probed_stack(own: Sequence[Sample], constants: Constants) -> Stack:
    """Return the constants of the stack of `own` rows, which are few, where `constants` say what else is known."""
    name = own[0].configuration.stack.name
    before = constants.stack(name)
    adjusted = replace(_fitted(own, constants), matmul=before.matmul)
    known = probed(seen(own, _with(constants, adjusted)), _prior(constants, name))
    rate = adjusted.matmul * math.exp(known.offset)
    return replace(adjusted, matmul=rate, spread=known.spread, wait_spread=known.waits)


def _with(constants: Constants, stack: Stack) -> Constants:
    return Constants(constants.accelerators, {**constants.stacks, stack.name: stack})


def _fitted(own: Sequence[Sample], constants: Constants) -> Stack:
    """The stack whose ADJUSTED constants are those of the least sum of `calibrate.py` over these rows."""
    before = constants.stack(own[0].configuration.stack.name)

    def departed(at: np.ndarray) -> Stack:
        values = {name: getattr(before, name) * math.exp(value) for name, value in zip(ADJUSTED, at, strict=True)}
        return replace(before, **values)

    def errors(at: np.ndarray) -> np.ndarray:
        given = _with(constants, departed(at))
        return np.array([sample.error(given.applied(sample.configuration)) for sample in own])

    def slopes(at: np.ndarray, now: np.ndarray) -> np.ndarray:
        moved = at + WIDTH * np.eye(len(ADJUSTED))
        return np.stack([(errors(one) - now) / WIDTH for one in moved], axis=1)

    sd = np.array([STACK_SD[name] for name in ADJUSTED])
    wanted = RobustSum(np.full(len(own), WEIGHT), TOLERANCE, sd, np.full(len(ADJUSTED), -math.inf))
    return departed(minimum(errors, slopes, wanted)[0])


def _prior(constants: Constants, stack: str) -> Prior:
    """Return a stack before its probes: its own spread where it was fitted, the usual one where it was not."""
    known = constants.stack(stack)
    if stack in constants.stacks:
        return Prior(known.offset, known.spread, known.wait_spread, USUAL_ROWS)
    return Prior(known.offset, USUAL, known.wait_spread, STRANGER_ROWS)
