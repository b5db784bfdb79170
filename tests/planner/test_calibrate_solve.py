"""The minimum of a robust sum: bounds that hold, rows that contradict the others, few evaluations."""

from __future__ import annotations

import math

import numpy as np
import pytest

from shardwise.planner.published.calibrate_solve import RobustSum, minimum

ROWS = np.random.default_rng(7).normal(size=(40, 3))
FREE = np.full(3, -math.inf)


def line(truth: np.ndarray, least: np.ndarray, odd: int = 0) -> tuple[np.ndarray, int]:
    """(what is found, slopes that were asked for) of rows that are curved in three unknowns; the first `odd` of them
    say something else."""
    asked = []
    said = np.concatenate([np.full(odd, 5.0), np.zeros(len(ROWS) - odd)])

    def errors(at: np.ndarray) -> np.ndarray:
        return np.asarray(np.tanh(ROWS @ at) - np.tanh(ROWS @ truth) + said)

    def slopes(at: np.ndarray, now: np.ndarray) -> np.ndarray:
        asked.append(at)
        return np.stack([(errors(at + 1e-6 * one) - now) / 1e-6 for one in np.eye(3)], axis=1)

    wanted = RobustSum(np.full(len(ROWS), 4.0), 0.1, np.full(3, 10.0), least)
    return minimum(errors, slopes, wanted)[0], len(asked)


def test_curved_rows_are_followed_with_slopes_of_a_few_rounds() -> None:
    truth = np.array([0.9, -0.6, 0.3])
    found, asked = line(truth, FREE)
    assert found == pytest.approx(truth, abs=0.01) and asked < 5


def test_rows_that_contradict_the_others_do_not_bend_them() -> None:
    truth = np.array([0.9, -0.6, 0.3])
    assert line(truth, FREE, odd=6)[0] == pytest.approx(truth, abs=0.02)


def test_an_unknown_stays_at_its_least_value_while_the_others_are_found() -> None:
    """Where the second would rather be below zero, it is at zero, and the others are as if there were only them."""
    truth, least = np.array([0.9, -0.6, 0.3]), np.array([-math.inf, 0.0, -math.inf])
    bounded, free = line(truth, least)[0], line(truth, FREE)[0]
    assert bounded[1] == 0.0 > free[1]
    nudged = [bounded + 0.02 * sign * one for sign in (1, -1) for one in np.eye(3)[[0, 2]]]
    wanted = RobustSum(np.full(len(ROWS), 4.0), 0.1, np.full(3, 10.0), least)
    sums = [wanted.of(at, np.tanh(ROWS @ at) - np.tanh(ROWS @ truth)) for at in (bounded, *nudged)]
    assert sums[0] == min(sums)


def test_what_no_row_has_stays_at_zero() -> None:
    wanted = RobustSum(np.full(2, 4.0), 0.1, np.ones(2), np.full(2, -math.inf))
    found, left = minimum(lambda at: at[:1].repeat(2) - 0.4, lambda at, now: np.array([[1.0, 0.0]] * 2), wanted)
    assert found[1] == 0.0 and found[0] == pytest.approx(0.4, abs=0.01) and left < 1
