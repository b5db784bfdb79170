"""The three of the ranked layouts to run first: those whose step times would narrow the forecast most.

Measured steps fit the rate of matrix products (`shardwise.planner.published.calibrate_spread.probed`). Before
anything is run, each layout is taken to run as predicted, and the three are looked for that leave the first the
narrowest interval. Layouts that wait for traffic say little of that rate, and are left for later.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import numpy as np

from shardwise.planner.formulas.predict import seconds_by_cause
from shardwise.planner.formulas.prediction import EIGHTY, TrainingConfiguration
from shardwise.planner.published.calibrate_spread import DEPARTURES, STRANGER_ROWS, USUAL, Prior, Seen, probed
from shardwise.planner.search.explain import layout_of
from shardwise.planner.search.search import SearchResult, distinct

RUNS = 3
LOOKED_AT = 8  # layouts of the ranking among which they are chosen
TRIED = 80  # of the departures every 80th is predicted; lines lie between


def probe_remark(result: SearchResult) -> Iterator[str]:
    """Yield which runs would narrow the first layout's interval most; nothing where there are too few, or on a CPU."""
    candidates = distinct(result.ranked, LOOKED_AT)
    if len(candidates) < RUNS or result.question.cluster.accelerator.name == "CPU":
        return
    first = candidates[0].prediction
    stack = candidates[0].configuration.stack
    prior = Prior(stack.offset, USUAL, stack.wait_spread, STRANGER_ROWS)
    rows = [Seen(_errors(candidate.configuration), candidate.prediction.waits) for candidate in candidates]

    def width(chosen: tuple[int, ...]) -> float:
        known = probed([rows[index] for index in chosen], prior)
        return math.exp(EIGHTY * math.hypot(known.spread, known.waits * first.waits))

    best = min(combinations(range(len(rows)), RUNS), key=width)
    step, narrow = first.step_seconds, width(best)
    names = "; ".join(f"#{index + 1} {layout_of(candidates[index])}" for index in best)
    yield (
        f"three runs that would say most: {names}. They fit the rate of matrix products, "
        f"{first.seconds['matmul'] / step:.0%} of the first layout's step; if they run as predicted, its interval is "
        f"{step / narrow:.3g}–{step * narrow:.3g} s"
    )


def _errors(configuration: TrainingConfiguration) -> np.ndarray:
    """The log errors that a step as predicted would have, were products exp(departure) times as fast."""
    tried = DEPARTURES[::TRIED]
    steps = [_seconds(configuration, float(departure)) for departure in tried]
    errors: np.ndarray = np.interp(DEPARTURES, tried, np.log(steps) - math.log(_seconds(configuration, 0.0)))
    return errors


def _seconds(configuration: TrainingConfiguration, departure: float) -> float:
    stack = replace(configuration.stack, matmul=configuration.stack.matmul * math.exp(departure))
    return sum(seconds_by_cause(replace(configuration, stack=stack)).values())
