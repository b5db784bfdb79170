"""The least robust sum of errors over unknowns, some of which have a least value.

    sum over rows of w · log(1 + (error / tolerance)^2) + sum over unknowns of log(1 + (u / sd)^2)

by rounds of linear least squares with Cauchy's weights. An unknown that a round would take below its least value stays
there while the others are found (an active set), and a step that makes the sum larger is halved; without either the
rounds swing about the minimum. Slopes cost one evaluation an unknown. So those of the last round are corrected by what
its step did to each row (Broyden 1965), and found anew where that gains nothing more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

ROUNDS = 60
STEP = 0.5  # of an unknown in a round, at most
HALVINGS = 5  # of a step that makes the sum larger
COARSE = 0.05  # of the sum, which a round has to gain, of fits of which there are many
SETTLED = 0.01  # and of those that are kept

Errors = Callable[[np.ndarray], np.ndarray]  # of the rows, at these values of the unknowns
Slopes = Callable[[np.ndarray, np.ndarray], np.ndarray]  # of the errors [rows, unknowns], at values with these errors


class RobustSum(NamedTuple):
    """The sum that is minimised: each row's weight, the error at which it is halved, the unknowns' usual sizes and
    least values."""

    weights: np.ndarray
    tolerance: float
    sd: np.ndarray
    least: np.ndarray

    def of(self, at: np.ndarray, errors: np.ndarray) -> float:
        rows = np.sum(self.weights * np.log1p((errors / self.tolerance) ** 2))
        return float(rows + np.sum(np.log1p((at / self.sd) ** 2)))

    def step(self, at: np.ndarray, errors: np.ndarray, slopes: np.ndarray) -> np.ndarray:
        """Return the step to the minimum of the sum that is linear in the errors and has the weights of `at`."""
        rows = np.sqrt(self.weights / (1 + (errors / self.tolerance) ** 2)) / self.tolerance
        near = 1 / (self.sd * np.sqrt(1 + (at / self.sd) ** 2))
        left = np.vstack([slopes * rows[:, None], np.diag(near)])
        right = np.concatenate([-errors * rows, -at * near])
        return np.clip(_bounded(left, right, self.least - at), -STEP, STEP)


def minimum(errors: Errors, slopes: Slopes, wanted: RobustSum, settled: float = COARSE) -> tuple[np.ndarray, float]:
    """Return (the unknowns, the sum) at the minimum that is found from zero, once a round gains `settled` or less."""
    at = np.zeros(len(wanted.sd))
    now = errors(at)
    own, fresh = slopes(at, now), True
    for _ in range(ROUNDS):
        step = wanted.step(at, now, own)
        for _ in range(HALVINGS if fresh else 1):
            then = errors(at + step)
            gained = wanted.of(at, now) - wanted.of(at + step, then)
            if gained > 0:
                own = _corrected(own, step, then - now)
                at, now = at + step, then
                break
            step = step / 2
        if gained > settled:
            fresh = False
        elif fresh:
            break
        else:
            own, fresh = slopes(at, now), True
    return at, wanted.of(at, now)


def _corrected(slopes: np.ndarray, step: np.ndarray, moved: np.ndarray) -> np.ndarray:
    """Slopes of which each row's are what it `moved` by in `step`, with the least change of those that it has."""
    own = np.where(slopes != 0, step, 0.0)
    missed = moved - slopes @ step
    return slopes + own * (missed / np.maximum(1e-12, np.sum(own**2, axis=1)))[:, None]


def _bounded(left: np.ndarray, right: np.ndarray, least: np.ndarray) -> np.ndarray:
    """Solution of least squares, none of whose unknowns is below its `least`."""
    free, solution = np.ones(len(least), bool), np.zeros(len(least))
    while True:
        solution[free] = np.linalg.lstsq(left[:, free], right - left[:, ~free] @ solution[~free], rcond=None)[0]
        below = free & (solution < least)
        if not below.any():
            return solution
        solution[below], free = least[below], free & ~below
