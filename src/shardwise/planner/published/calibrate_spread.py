"""The width of intervals: variance components of the log error, from rows that were measured.

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
- `probed`: of a stack of which a few rows were measured, what these say joined with what is known of others. What
  departs there is one factor, of which each row says how wrong it would be under any value (`Seen`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from shardwise.planner.formulas.prediction import EIGHTY

Scatter = Sequence[tuple[float, float]]  # (log error, share of waits) of rows
HALF = 0.6745  # standard deviations that hold half of a normal distribution
HELD = 0.8  # share of the rows that an interval holds
USUAL = 0.05  # spread of computation on a stack that is well known
USUAL_ROWS = 8.0  # rows that the usual spread counts as, in a fit of many constants
STRANGER_ROWS = 1.0  # and of a stranger, of which it says little: stacks' spreads lie a factor of 20 apart
DEPARTURES = np.linspace(-2.0, 2.0, 801)  # logarithms of a stack's factor that are tried: up to seven times as fast
WAIT_SPREADS = tuple(step / 20 for step in range(17))  # those tried


def wait_spread(stacks: Sequence[Scatter]) -> float:
    """Return what waiting adds: the value of the narrowest intervals that hold 80 % of each stack's rows."""
    return min(WAIT_SPREADS, key=lambda waits: math.fsum(_width(scatter, waits) for scatter in stacks))


def spread(scatter: Scatter, waits: float) -> float:
    """Return the spread of computation on a stack, from its rows."""
    rows = len(scatter)
    own = _needed(scatter, waits)
    return math.sqrt((rows * own**2 + USUAL_ROWS * USUAL**2) / (rows + USUAL_ROWS))


def unknown_spread(stacks: Sequence[Scatter]) -> float:
    """Return the spread of a stack that nobody has measured, from rows of others predicted as if nobody had."""
    usual = [median(abs(error) for error, _ in scatter) / HALF for scatter in stacks]
    between = math.sqrt(math.fsum(size**2 for size in usual) / len(usual))
    return max(USUAL, between * student(max(1, len(usual) - 2)))


class Seen(NamedTuple):
    """A measured row: its log error under each of DEPARTURES, float64 [801], and its share of waits."""

    errors: np.ndarray
    waits: float


def alike(error: float, waits: float) -> Seen:
    """A row all of whose step a factor makes quicker."""
    return Seen(error - DEPARTURES, waits)


def unknown_offset(stacks: Sequence[Sequence[Seen]]) -> float:
    """Return how far stacks usually depart from the default: the scale of a Cauchy distribution, its median.

    A stack's departure is that with the least sum of absolute errors.
    """
    offsets = (abs(float(DEPARTURES[np.abs([row.errors for row in own]).sum(axis=0).argmin()])) for own in stacks)
    return max(USUAL / 2, median(offsets))


class Prior(NamedTuple):
    """A stack before any of its rows: the scale of its departure, its rows' spread about that and what
    waiting adds, and how many rows that spread counts as."""

    offset: float
    spread: float
    waits: float
    rows: float


class Probed(NamedTuple):
    """After some rows: the stack's departure, and the components of the spread that a further row has about it."""

    offset: float
    spread: float
    waits: float


def probed(rows: Sequence[Seen], prior: Prior) -> Probed:
    """Return what a few rows of a stack say of the next one.

    A row's error e(b) under the stack's departure b has the variance k^2 u, u = spread^2 + (waits · w)^2. b is drawn
    from a Cauchy distribution, as stacks lie close together but for a few; 1 / k^2 from a gamma distribution of mean 1
    with `rows` degrees of freedom. Then b given n rows has the density

        (rows + sum of e(b)^2 / u)^(-(rows + n) / 2) / (1 + (b / offset)^2),

    whose mean is the departure that is taken, and a further row's error is Student's t with rows + n - 1 degrees of
    freedom, as wide as the rows seen disagree (Gelman et al., Bayesian Data Analysis, 3rd ed., sections 3.2 and 5.4).
    """
    size = np.array([prior.spread**2 + (prior.waits * row.waits) ** 2 for row in rows])
    errors = np.array([row.errors for row in rows])
    misfit = (errors**2 / size[:, None]).sum(axis=0)
    logs = -(prior.rows + len(rows)) / 2 * np.log(prior.rows + misfit) - np.log1p((DEPARTURES / prior.offset) ** 2)
    weights = np.exp(logs - logs.max())
    offset = float((weights * DEPARTURES).sum() / weights.sum())
    slopes = np.array([np.interp(offset, DEPARTURES, slope) for slope in np.gradient(errors, DEPARTURES, axis=1)])
    freedom = prior.rows + len(rows) - 1
    left = float(np.interp(offset, DEPARTURES, misfit))
    wider = (prior.rows + left) / freedom * student(freedom) ** 2
    own = wider * (prior.spread**2 + float((slopes**2).mean() / (slopes**2 / size).sum()))
    return Probed(offset, math.sqrt(own), math.sqrt(wider) * prior.waits)


def student(freedom: float) -> float:
    """Return how much wider 80 % of Student's t is than of a normal distribution.

    After Abramowitz and Stegun 1964, 26.7.5.
    """
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
