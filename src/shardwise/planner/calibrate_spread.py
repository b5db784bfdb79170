"""How wide intervals have to be: variance components of the log error, from rows that were measured.

A row's variance is that of computation on its stack, and (wait_spread · w)^2 for the share w of the step that is
traffic, launching and waiting, which no row's configuration tells as well. Each component is as small as it can be with
80 % of the rows inside their intervals, so heavy tails count as they are and nothing is taken to be normal.

- `wait_spread`, one for all stacks: of several, that with the narrowest intervals on the geometric mean.
- `spread` of a stack: of its own rows, drawn to the usual one where there are few.
- `unknown_spread`: variance between stacks, of rows predicted without their stack's constants. A stack's rows err
  together, so which stacks are measured matters more than how many rows they have: each counts once, by the size of its
  usual error, and the mean of their squares is what a further stack is expected to have, held with the quantile of
  Student's t since there are few (the predictive interval of a random-effects model; Higgins, Thompson and
  Spiegelhalter 2009, section 4). Some stacks' rows are then all inside and some stacks' half outside; 80 % is meant
  over stacks.
- `probed`: of a stack of which a few rows were measured, what these say joined with what is known of others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from shardwise.planner.prediction import EIGHTY

Scatter = Sequence[tuple[float, float]]  # (log error, share of waits) of rows
HALF = 0.6745  # standard deviations that hold half of a normal distribution
HELD = 0.8  # share of the rows that an interval holds
USUAL = 0.05  # spread of computation on a stack that is well known
USUAL_ROWS = 8.0  # rows that the usual spread counts as, in a fit of many constants
STRANGER_ROWS = 1.0  # and of a stranger, of which it says little: stacks' spreads lie a factor of 20 apart
OFFSETS = 401  # common errors of a stack that are tried, over
REACH = 1.25  # times the largest of its rows' errors
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
    between = math.sqrt(math.fsum(size**2 for size in usual) / len(usual))
    return max(USUAL, between * student(max(1, len(usual) - 2)))


def unknown_offset(stacks: Sequence[Scatter]) -> float:
    """How far a stack's rows usually lie from predictions together: the scale of a Cauchy distribution, its median."""
    return max(USUAL / 2, median(abs(median(error for error, _ in scatter)) for scatter in stacks))


class Prior(NamedTuple):
    """What is known of a stack before any of its rows: the scale of its common error, its rows' spread about that and
    what waiting adds, and how many rows that spread counts as."""

    offset: float
    spread: float
    waits: float
    rows: float


class Probed(NamedTuple):
    """After some rows: the common log error, and the components of the spread that a further row has about it."""

    offset: float
    spread: float
    waits: float


def probed(scatter: Scatter, prior: Prior) -> Probed:
    """What a few rows of a stack say of the next one.

    A row's error is the stack's offset b and its own, of variance k^2 u with u = spread^2 + (waits · w)^2. b is drawn
    from a Cauchy distribution, as stacks lie close together but for a few; 1 / k^2 from a gamma distribution of mean 1
    with `rows` degrees of freedom. Then b given n rows has the density

        (rows + sum of (error - b)^2 / u)^(-(rows + n) / 2) / (1 + (b / offset)^2),

    whose mean is the offset that is taken off, and a further row's error is Student's t with rows + n - 1 degrees of
    freedom, as wide as the rows seen disagree (Gelman et al., Bayesian Data Analysis, 3rd ed., sections 3.2 and 5.4).
    """
    size = [prior.spread**2 + (prior.waits * share) ** 2 for _, share in scatter]
    reach = max(USUAL, REACH * max(abs(error) for error, _ in scatter))
    tried = [reach * (2 * step / (OFFSETS - 1) - 1) for step in range(OFFSETS)]

    def misfit(offset: float) -> float:
        return math.fsum((error - offset) ** 2 / one for (error, _), one in zip(scatter, size))

    power = (prior.rows + len(scatter)) / 2
    logs = [-power * math.log(prior.rows + misfit(b)) - math.log1p((b / prior.offset) ** 2) for b in tried]
    weights = [math.exp(each - max(logs)) for each in logs]
    offset = math.fsum(weight * b for weight, b in zip(weights, tried)) / math.fsum(weights)
    freedom = prior.rows + len(scatter) - 1
    wider = (prior.rows + misfit(offset)) / freedom * student(freedom) ** 2
    own = wider * (prior.spread**2 + 1 / math.fsum(1 / one for one in size))
    return Probed(offset, math.sqrt(own), math.sqrt(wider) * prior.waits)


def student(freedom: float) -> float:
    """How much wider 80 % of Student's t is than of a normal distribution (Abramowitz and Stegun 1964, 26.7.5)."""
    z, n = EIGHTY, freedom
    terms = (z**3 + z) / (4 * n), (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
    return 1 + (sum(terms) + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)) / z


def _needed(scatter: Scatter, waits: float) -> float:
    """The spread with which intervals hold 80 % of the rows and of one more, which is yet to come."""
    needed = sorted(math.sqrt(max(0.0, (error / EIGHTY) ** 2 - (waits * share) ** 2)) for error, share in scatter)
    return needed[min(len(needed), math.ceil(HELD * (len(needed) + 1) - 1e-9)) - 1]


def _width(scatter: Scatter, waits: float) -> float:
    """Mean logarithm of a stack's widths, times its rows."""
    own = max(spread(scatter, waits), 1e-3)
    return math.fsum(math.log(math.hypot(own, waits * share)) for _, share in scatter)
