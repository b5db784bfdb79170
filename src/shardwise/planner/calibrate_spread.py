"""How wide intervals have to be: variance components of the log error, from rows that were measured.

A row's variance is that of computation on its stack, and (wait_spread · w)^2 for the share w of the step that is
traffic, launching and waiting, which no row's configuration tells as well. Each component is as small as it can be with
80 % of the rows inside their intervals, so heavy tails count as they are and nothing is taken to be normal.

- `wait_spread`, one for all stacks: of several, that with the narrowest intervals on the geometric mean.
- `spread` of a stack: of its own rows, drawn to the usual one where there are few.
- `unknown_spread`: variance between stacks, of rows predicted without their stack's constants. A stack's rows err
  together, so which stacks are measured matters more than how many rows they have: each counts once, by the size of its
  usual error, and the mean of their squares is what a further stack is expected to have (the between-group variance of
  a random-effects model; Higgins, Thompson and Spiegelhalter 2009, section 4). Some stacks' rows are then all inside
  and some stacks' half outside; 80 % is meant over stacks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from shardwise.planner.prediction import EIGHTY

Scatter = Sequence[tuple[float, float]]  # (log error, share of waits) of rows
HALF = 0.6745  # standard deviations that hold half of a normal distribution
HELD = 0.8  # share of the rows that an interval holds
USUAL = 0.05  # spread of computation on a stack that is well known
USUAL_ROWS = 8.0  # rows that the usual spread counts as
WAIT_SPREADS = tuple(step / 20 for step in range(17))  # those tried


def wait_spread(stacks: Sequence[Scatter]) -> float:
    """What waiting adds: the value that makes intervals narrowest while each stack's hold 80 % of its rows."""
    return min(WAIT_SPREADS, key=lambda waits: math.fsum(_width(scatter, waits) for scatter in stacks))


def spread(scatter: Scatter, waits: float) -> float:
    """Of computation on a stack, from its rows."""
    rows = len(scatter)
    own = _needed(scatter, waits)
    return math.sqrt((rows * own**2 + USUAL_ROWS * USUAL**2) / (rows + USUAL_ROWS))


def unknown_spread(stacks: Sequence[Scatter]) -> float:
    """Of a stack that nobody has measured, from rows of others that were predicted as if nobody had."""
    usual = [median(abs(error) for error, _ in scatter) / HALF for scatter in stacks]
    return max(USUAL, math.sqrt(math.fsum(size**2 for size in usual) / len(usual)))


def probed_spread(errors: Sequence[float]) -> float:
    """Of a stack whose factor on time was fitted on a few rows: what those keep, the usual, and the factor's own."""
    kept = math.fsum(error**2 for error in errors)
    rows = max(0, len(errors) - 1)
    own = (kept + USUAL_ROWS * USUAL**2) / (rows + USUAL_ROWS)
    return math.sqrt(own * (1 + 1 / max(1, len(errors))))


def _needed(scatter: Scatter, waits: float) -> float:
    """The spread with which intervals hold 80 % of the rows and of one more, which is yet to come."""
    needed = sorted(math.sqrt(max(0.0, (error / EIGHTY) ** 2 - (waits * share) ** 2)) for error, share in scatter)
    return needed[min(len(needed), math.ceil(HELD * (len(needed) + 1) - 1e-9)) - 1]


def _width(scatter: Scatter, waits: float) -> float:
    """Mean logarithm of a stack's widths, times its rows."""
    own = max(spread(scatter, waits), 1e-3)
    return math.fsum(math.log(math.hypot(own, waits * share)) for _, share in scatter)
