"""How wide intervals have to be: variance components of the log error, from rows that were measured.

A row's variance is that of computation on its stack, and (wait_spread · w)^2 for the share w of the step that is
traffic, launching and waiting, which no row's configuration tells as well. Each component is as small as it can be with
80 % of the rows inside their intervals, so heavy tails count as they are and nothing is taken to be normal.

- `wait_spread`, one for all stacks: of several, that with the narrowest intervals on the geometric mean.
- `spread` of a stack: of its own rows, drawn to the usual one where there are few.
- `unknown_spread`: of rows predicted without their stack's constants, each stack counting alike. A stack's rows err
  together, so this holds for 80 % of stacks' rows in the long run, not in each stack.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardwise.planner.prediction import EIGHTY

Scatter = Sequence[tuple[float, float]]  # (log error, share of waits) of rows
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
    own = _needed([(scatter, 1.0 / (rows + 1))], waits)  # a further row is among those that have to be held
    return math.sqrt((rows * own**2 + USUAL_ROWS * USUAL**2) / (rows + USUAL_ROWS))


def unknown_spread(stacks: Sequence[Scatter], waits: float) -> float:
    """Of computation on a stack that nobody has measured, from rows predicted as if nobody had."""
    return max(USUAL, _needed([(scatter, 1.0 / len(scatter)) for scatter in stacks], waits))


def probed_spread(errors: Sequence[float]) -> float:
    """Of a stack whose factor on time was fitted on a few rows: what those keep, the usual, and the factor's own."""
    kept = math.fsum(error**2 for error in errors)
    rows = max(0, len(errors) - 1)
    own = (kept + USUAL_ROWS * USUAL**2) / (rows + USUAL_ROWS)
    return math.sqrt(own * (1 + 1 / max(1, len(errors))))


def _needed(stacks: Sequence[tuple[Scatter, float]], waits: float) -> float:
    """The spread with which intervals hold 80 % of every stack's weight; each of its rows has that given."""
    rows = sorted(
        (math.sqrt(max(0.0, (error / EIGHTY) ** 2 - (waits * share) ** 2)), weight)
        for scatter, weight in stacks
        for error, share in scatter
    )
    wanted, below = HELD * len(stacks), 0.0
    for needed, weight in rows:
        below += weight
        if below >= wanted - 1e-9:
            return needed
    return rows[-1][0]


def _width(scatter: Scatter, waits: float) -> float:
    """Mean logarithm of a stack's widths, times its rows."""
    own = max(spread(scatter, waits), 1e-3)
    return math.fsum(math.log(math.hypot(own, waits * share)) for _, share in scatter)
