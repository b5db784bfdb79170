"""Refitting the constants from measured rows.

Unknowns are logarithms: a factor on all accelerators' rate of matrix products and each one's departure, factors on the
default stack's constants, and for each stack of the rows its own departures from the default. They minimise

    sum over rows of w · log(predicted / measured)^2 / n(stack) + sum over unknowns of w · (u / sd)^2,

so that stacks count alike, however many rows they have, and a departure has to pay for itself: a stack with five rows
stays near the default, one that is not among the rows is the default. The weights w = 1 / (1 + (residual / 0.1)^2), or
of u / sd, from the last round, keep contradictory rows from bending the others and one slow stack from slowing the
default (iteratively reweighted least squares with Cauchy's weights, Holland and Welsch 1977; `calibrate_solve.py`).
Derivatives are differences.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np

from shardwise.planner.constants.hardware import DATA, GIB
from shardwise.planner.constants.inventory import Constants, family
from shardwise.planner.formulas.predict import predict, seconds_by_cause
from shardwise.planner.formulas.prediction import Stack, TrainingConfiguration
from shardwise.planner.published.calibrate_memory import FACTORS, LEAST_ROWS, Held, fit_memory
from shardwise.planner.published.calibrate_solve import COARSE, SETTLED, RobustSum, minimum
from shardwise.planner.published.calibrate_spread import (
    DEPARTURES,
    Seen,
    spread,
    unknown_offset,
    unknown_spread,
    wait_spread,
)
from shardwise.planner.published.mapping import configuration
from shardwise.planner.published.measurement import is_of_one_block, measured, predicted
from shardwise.planner.published.row import Row, Unmapped
from shardwise.planner.published.tables import read_table

TOLERANCE = 0.1  # log error at which a row's weight is halved
EVIDENCE = 24.0  # rows that a whole stack counts as
ALL_SD = 0.10  # what training reaches of benchmarked products, on all alike
FAMILY_SD = 0.04  # and of one family
# One software's kernels for experts say little of another's: its own departure is the cheaper one.
DEFAULT_SD = {
    "attention": 0.3, "memory_bound": 0.3, "score_passes": 0.3, "launch": 0.3, "overlap": 0.2,
    "recompute": 0.2, "tensor_exposed": 0.3, "expert_exposed": 0.3, "grouped": 0.1, "sorting": 0.7,
}  # fmt: skip
STACK_SD = {
    "matmul": 0.10, "attention": 0.2, "memory_bound": 0.5, "score_passes": 0.4, "launch": 0.5, "overlap": 0.2,
    "recompute": 0.2, "network": 0.2, "pipeline_wait": 1.0, "stall": 1.0,
    "tensor_exposed": 0.3, "expert_exposed": 0.3, "grouped": 0.3, "sorting": 0.2,
}  # fmt: skip
TRIED = 20  # of the departures of products every 20th is predicted, 0.1 apart; a line in between is off by 0.0004
MEMORY = (*FACTORS, "logit_bytes", "memory_spread")
OVERLAP = 2.0  # before anything is fitted; from above, fits stop at either of two values that explain all as well
WAITS = {"pipeline_wait": 3e-3, "stall": 0.5}  # constants in seconds, and the unit in which each is fitted


class Unknown(NamedTuple):
    """kind: accelerator, default or stack; name: of the accelerator's family or of the stack."""

    kind: str
    name: str
    constant: str
    sd: float


@dataclass(frozen=True)
class Sample:
    """A measured row and what it ran."""

    row: Row
    configuration: TrainingConfiguration

    def error(self, configuration: TrainingConfiguration) -> float:
        """log(predicted seconds / measured seconds)."""
        causes = seconds_by_cause(configuration)
        seconds = sum(causes.values()) - (causes["optimizer"] if is_of_one_block(self.row) else 0.0)
        return math.log(seconds / self._measured_seconds)

    @cached_property
    def _measured_seconds(self) -> float:
        """Seconds of what was measured; a rate is that of the step that it would take."""
        measurement = measured(self.row)
        assert measurement is not None
        if measurement.unit == "step_s":
            return measurement.value
        prediction = predict(self.configuration)
        return prediction.step_seconds * predicted(self.row, prediction) / measurement.value


def samples(rows: Iterable[Row], role: str = "calibrate") -> list[Sample]:
    """The rows of a role that are mapped and have a time; the constants of accelerators are as shipped."""
    usable = []
    for row in rows:
        try:
            if row.text["fit_role"] == role and measured(row):
                usable.append(Sample(row, configuration(row)))
        except Unmapped:
            continue
    return usable


@cache
def shipped_rows() -> tuple[Row, ...]:
    """The rows that the shipped constants were fitted on."""
    return tuple(read_table(DATA / "calibration.csv"))


def fit(given: Sequence[Sample], known: Mapping[str, Stack] | None = None, settled: float = SETTLED) -> Constants:
    """Constants that fit the samples. Stacks of `known` keep what is not fitted together with the others.

    `settled`: of the sum that is minimised, what the last round may gain.
    """
    stacks = known or {}
    bases = {name: stacks[name] if name in stacks else _base(own) for name, own in _by_stack(given).items()}
    return _with_spread(given, _solved(given, bases, settled)[0])


def _by_stack(given: Sequence[Sample]) -> dict[str, list[Sample]]:
    by_stack: dict[str, list[Sample]] = {}
    for sample in given:
        by_stack.setdefault(sample.configuration.stack.name, []).append(sample)
    return by_stack


def _base(own: Sequence[Sample]) -> Stack:
    """A stack before its times are fitted: memory, and what explains them best of the ways to cut and recompute."""
    ways = [Stack(own[0].configuration.stack.name)]
    if any(sample.configuration.pipeline > 1 for sample in own):
        ways += [replace(way, cuts_by_cost=True) for way in ways]
    if any(sample.configuration.checkpointing == "full" for sample in own):
        ways += [replace(way, stops_early=True) for way in ways]
    ways = [_with_memory(own, fit_memory(_held(own), way)) for way in ways]
    return min(ways, key=lambda way: _solved(own, {way.name: way})[1]) if len(ways) > 1 else ways[0]


def _with_memory(own: Sequence[Sample], way: Stack) -> Stack:
    """`way` with its memory fitted again once its times are, since these say how far a host gets ahead."""
    if sum(row.size is not None for row in _held(own)) < LEAST_ROWS:
        return way
    constants = _solved(own, {way.name: way})[0]
    timed = [replace(sample, configuration=constants.applied(sample.configuration)) for sample in own]
    fitted = fit_memory(_held(timed), constants.stacks[way.name])
    return replace(way, **{name: getattr(fitted, name) for name in MEMORY})  # type: ignore[arg-type]


def _held(own: Sequence[Sample]) -> list[Held]:
    sizes = [sample.row.numbers.get("mem_gb") for sample in own]
    return [Held(measured.configuration, None if size is None else size * GIB) for measured, size in zip(own, sizes)]


def _solved(given: Sequence[Sample], bases: Mapping[str, Stack], settled: float = COARSE) -> tuple[Constants, float]:
    """(constants, what they leave of the sum that they minimise) that depart from the stacks' `bases`."""
    unknowns, by_stack = _unknowns(given), _by_stack(given)
    share = [min(1.0, EVIDENCE / len(by_stack[sample.configuration.stack.name])) for sample in given]
    least = [0.0 if unknown.constant in WAITS else -math.inf for unknown in unknowns]
    wanted = RobustSum(4 * np.array(share), TOLERANCE, np.array([unknown.sd for unknown in unknowns]), np.array(least))
    at, left = minimum(
        lambda at: _errors(given, _constants(unknowns, at, bases)),
        lambda at, errors: _slopes(given, unknowns, at, bases, errors),
        wanted,
        settled,
    )
    return _constants(unknowns, at, bases), left


def _unknowns(given: Sequence[Sample]) -> list[Unknown]:
    families = sorted({family(sample.configuration.cluster.accelerator) for sample in given})
    names = sorted({sample.configuration.stack.name for sample in given})
    return [
        Unknown("accelerator", "*", "matmul", ALL_SD),
        *(Unknown("accelerator", name, "matmul", FAMILY_SD) for name in families),
        *(Unknown("default", "default", constant, sd) for constant, sd in DEFAULT_SD.items()),
        *(Unknown("stack", name, constant, sd) for name in names for constant, sd in STACK_SD.items()),
    ]


def _constants(unknowns: Sequence[Unknown], at: np.ndarray, bases: Mapping[str, Stack]) -> Constants:
    accelerators: dict[str, float] = {}
    departures: dict[str, dict[str, float]] = {"default": {}}
    for unknown, value in zip(unknowns, at):
        if unknown.kind == "accelerator":
            accelerators[unknown.name] = math.exp(value + (0.0 if unknown.name == "*" else at[0]))
        else:
            departures.setdefault(unknown.name, {})[unknown.constant] = float(value)
    neutral = Stack("default", cuts_by_cost=True, stops_early=True, overlap=OVERLAP)
    stacks = {}
    for name, own in departures.items():
        values: dict[str, float] = {}
        base = bases.get(name, neutral)
        for constant in STACK_SD:
            if constant in WAITS:
                values[constant] = WAITS[constant] * max(0.0, own.get(constant, 0.0))
            else:
                total = departures["default"].get(constant, 0.0) + (own.get(constant, 0.0) if name != "default" else 0)
                values[constant] = getattr(neutral, constant) * math.exp(total)
        stacks[name] = replace(base, **values)  # type: ignore[arg-type]
    return Constants(accelerators, stacks)


def _errors(given: Sequence[Sample], constants: Constants) -> np.ndarray:
    return np.array([sample.error(constants.applied(sample.configuration)) for sample in given])


def _slopes(
    given: Sequence[Sample], unknowns: Sequence[Unknown], at: np.ndarray, bases: Mapping[str, Stack], base: np.ndarray
) -> np.ndarray:
    """Slopes of the errors `base`.

    Logarithms add up, so a row's slope is the same by its stack's departure and by the default's, or by the factor on
    its accelerator's family and by that on all; it is found once.
    """
    slopes, width = np.zeros((len(given), len(unknowns))), 0.02
    for of_accelerator, constant in sorted({(unknown.kind == "accelerator", unknown.constant) for unknown in unknowns}):
        alike = {
            index: unknown
            for index, unknown in enumerate(unknowns)
            if (unknown.kind == "accelerator", unknown.constant) == (of_accelerator, constant)
        }
        moved = at.copy()
        moved[[index for index, unknown in alike.items() if unknown.kind == "stack" or unknown.name == "*"]] += width
        constants = _constants(unknowns, moved, bases)
        for line, sample in enumerate(given):
            if _moves(constant, sample.configuration):
                slope = (sample.error(constants.applied(sample.configuration)) - base[line]) / width
                part, stack = family(sample.configuration.cluster.accelerator), sample.configuration.stack.name
                own = [index for index, unknown in alike.items() if unknown.name in ("*", "default", part, stack)]
                slopes[line, own] = slope
    return slopes


def _moves(constant: str, configuration: TrainingConfiguration) -> bool:
    """Return whether a constant can change the time of a configuration."""
    return {
        "attention": configuration.flash,
        "score_passes": not configuration.flash,
        "recompute": configuration.checkpointing != "none",
        "pipeline_wait": configuration.pipeline > 1,
        "stall": configuration.pipeline > 1,
        "tensor_exposed": configuration.sequence_parallel,
        "expert_exposed": configuration.expert > 1,
        "grouped": configuration.model.stacked > 0,
        "sorting": configuration.model.stacked > 0 and not configuration.sorts_rows,
    }.get(constant, True)


def _with_spread(given: Sequence[Sample], constants: Constants) -> Constants:
    """Return `stacks` with how far measurements lie from predictions, and with their sources (`calibrate_spread`).

    Of a stack that is not among the rows: how far each stack's rows lie from what the default's constants predict.
    """
    groups = _by_stack(given)
    scatter = {name: scattered(own, constants) for name, own in groups.items()}
    waits = wait_spread(list(scatter.values()))
    unknown = Constants(constants.accelerators, {"default": constants.stacks["default"]})
    strangers = [scattered(own, unknown) for own in groups.values()]
    default, between = constants.stacks["default"], unknown_offset([seen(own, unknown) for own in groups.values()])
    stacks = {"default": replace(default, spread=unknown_spread(strangers), offset=between)}
    for name, own in groups.items():
        errors = [error for error, _ in scatter[name]]
        source = _source(errors, [sample.row for sample in own])
        width = spread(scatter[name], waits)
        stacks[name] = replace(constants.stacks[name], spread=width, offset=width, source=source)
    return Constants(
        constants.accelerators, {name: replace(stack, wait_spread=waits) for name, stack in stacks.items()}
    )


def scattered(own: Sequence[Sample], constants: Constants) -> list[tuple[float, float]]:
    """(log error, share of waits) of each row under `constants`."""
    applied = [constants.applied(sample.configuration) for sample in own]
    return [(sample.error(configuration), predict(configuration).waits) for sample, configuration in zip(own, applied)]


def seen(own: Sequence[Sample], constants: Constants) -> list[Seen]:
    """Each row's error where the stack's matrix products depart from `constants`, and its share of waits.

    Products are most of a step's time, and what software differs in (the fitted stacks lie at 0.74 to 1.02). A factor
    on all of the step would also scale what it waits for, which is the fabric's.
    """
    return [_seen(sample, constants.applied(sample.configuration)) for sample in own]


def _seen(sample: Sample, applied: TrainingConfiguration) -> Seen:
    tried = DEPARTURES[::TRIED]
    errors = [sample.error(faster(applied, float(departure))) for departure in tried]
    return Seen(np.interp(DEPARTURES, tried, errors), predict(applied).waits)


def faster(given: TrainingConfiguration, departure: float) -> TrainingConfiguration:
    """`given` with matrix products exp(departure) times as fast."""
    return replace(given, stack=replace(given.stack, matmul=given.stack.matmul * math.exp(departure)))


def _source(errors: Sequence[float], rows: Sequence[Row]) -> str:
    """Return where a stack's constants are from, and how well they fit."""
    sizes = sorted(abs(math.expm1(error)) for error in errors)
    names = sorted({row.text.get("source", "") for row in rows})
    return (
        f"fitted on {len(sizes)} rows of {', '.join(filter(None, names)) or 'a table'}: "
        f"median error {statistics.median(sizes):.1%}, largest {sizes[-1]:.1%}"
    )
