"""The planner's accuracy: a table's rows predicted from their configurations alone, against what was measured."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from typing import Any

from shardwise.planner.constants.hardware import GIB
from shardwise.planner.constants.inventory import Constants, shipped
from shardwise.planner.formulas.predict import predict
from shardwise.planner.published.calibrate import Sample, fit, samples, shipped_rows
from shardwise.planner.published.left_out import constants_without
from shardwise.planner.published.mapping import configuration, mapped
from shardwise.planner.published.measurement import measured, predicted
from shardwise.planner.published.probe import probed_stack
from shardwise.planner.published.row import Row, Unmapped

APART = 0.05  # pairs that differ by less are not ranked
GROUP = ("model", "tied", "gpu", "n_gpus", "stack", "seq", "gbs", "precision")
Choice = Callable[[str], Constants]  # the constants with which a stack is scored


@dataclass(frozen=True)
class RowResult:
    """A row: what was predicted and measured, in the row's own unit; memory in GiB."""

    row: Row
    unit: str = ""
    predicted: float | None = None
    measured: float | None = None
    interval: tuple[float, float] | None = None
    memory: float | None = None
    fits: bool | None = None
    unmapped: str | None = None
    probe: bool = False  # the stack's scalar was fitted on it
    taken: tuple[str, ...] = ()  # for cells that state nothing

    @property
    def scored(self) -> bool:
        return self.row.text["fit_role"] != "context" and not self.probe

    @property
    def error_percent(self) -> float | None:
        """|predicted - measured| / measured; 100 for a row that was measured and could not be mapped."""
        if self.unmapped and self.scored and self.measured is not None:
            return 100.0
        if self.predicted is None or self.measured is None:
            return None
        return 100 * abs(self.predicted / self.measured - 1)

    @property
    def measured_memory(self) -> float | None:
        return self.row.numbers.get("mem_gb")

    def to_dict(self) -> dict[str, Any]:
        return {
            "row": self.row.id,
            "predicted": self.predicted,
            "measured": self.measured,
            "error_percent": self.error_percent,
            "interval": list(self.interval) if self.interval else None,
            "predicted_memory_gb": self.memory,
            "measured_memory_gb": self.measured_memory,
            "unmapped": self.unmapped,
            "unit": self.unit,
            "fits": self.fits,
            "scored": self.scored,
            "taken": list(self.taken),
        }


def evaluate_rows(
    rows: Sequence[Row],
    constants: Constants | None = None,
    probe_rows: int = 0,
    probe_seed: int = 0,
    leave_one_stack_out: bool = False,
    leave_table_out: bool = False,
) -> list[RowResult]:
    """Return every row's result. `constants`: those of a file instead of the shipped ones.

    `probe_rows`: for each stack the constants that tell stacks apart are fitted on so many of its rows (`probe.py`),
    drawn with `probe_seed`, and the others are scored. `leave_one_stack_out`: each stack is predicted by constants
    refitted without any of its rows. `leave_table_out`: all of `rows` are predicted as if nobody had measured this
    software or these models (`left_out`).
    """
    choose = _choice(rows, constants or shipped(), leave_one_stack_out, leave_table_out)
    by_name, probes = _probe(rows, choose, probe_rows, probe_seed) if probe_rows else ({}, set())
    results = []
    for index, row in enumerate(rows):
        stack = row.text["stack"]
        result = _result(row, by_name[stack] if stack in by_name else choose(stack))
        results.append(replace(result, probe=index in probes))
    return results


def _choice(rows: Sequence[Row], given: Constants, leave_one_stack_out: bool, leave_table_out: bool) -> Choice:
    if leave_table_out:
        by_stack = constants_without(rows)
        return lambda stack: by_stack[stack]
    return _left_out if leave_one_stack_out else lambda stack: given


@cache
def _left_out(stack: str) -> Constants:
    """Constants refitted without a stack; those shipped where none of its rows was fitted on."""
    known = samples(shipped_rows())
    rest = [sample for sample in known if sample.row.text["stack"] != stack]
    return without(shipped() if len(rest) == len(known) else fit(rest), stack)


def without(constants: Constants, stack: str) -> Constants:
    """`constants` as they are for a stack that nobody has measured."""
    return Constants(constants.accelerators, {name: s for name, s in constants.stacks.items() if name != stack})


def _result(row: Row, constants: Constants) -> RowResult:
    measurement = None
    try:
        measurement = measured(row)
        run = mapped(row)
        prediction = predict(constants.applied(run.configuration))
        value = predicted(row, prediction)
    except Unmapped as reason:
        return RowResult(row, measured=measurement.value if measurement else None, unmapped=str(reason))
    unit = measurement.unit if measurement else "step_s"
    low, high = (seconds / prediction.step_seconds for seconds in prediction.interval)
    around = (value * low, value * high) if unit == "step_s" else (value / high, value / low)
    only_memory = measurement is None and "mem_gb" in row.numbers
    return RowResult(
        row,
        unit,
        None if only_memory else value,
        measurement.value if measurement else None,
        None if only_memory else around,
        prediction.logged_memory / GIB,
        prediction.may_fit,
        taken=run.taken,
    )


def _probe(rows: Sequence[Row], choose: Choice, count: int, seed: int) -> tuple[dict[str, Constants], set[int]]:
    """(by stack its constants as the probes give them; the probes' indices)."""
    by_stack: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        if row.text["fit_role"] != "context" and _sample(row):
            by_stack.setdefault(row.text["stack"], []).append(index)
    draw, by_name, probes = random.Random(seed), dict[str, Constants](), set[int]()
    for stack in sorted(by_stack):
        drawn = draw.sample(by_stack[stack], min(count, len(by_stack[stack])))
        samples = [sample for index in drawn if (sample := _sample(rows[index]))]
        constants = choose(stack)
        known = {**constants.stacks, stack: probed_stack(samples, constants)}
        by_name[stack] = Constants(constants.accelerators, known)
        probes |= set(drawn)
    return by_name, probes


def _sample(row: Row) -> Sample | None:
    try:
        return Sample(row, configuration(row)) if measured(row) else None
    except Unmapped:
        return None


# ------------------------------------------------------------------------------------------------------------- summary


def error_summary(results: Sequence[RowResult]) -> dict[str, Any]:
    """Return of one table errors in per cent, mapped share, share of rows inside their interval, memory, ranking."""
    scored = [result for result in results if result.scored]
    errors = [error for result in scored if (error := result.error_percent) is not None]
    inside = [
        result.interval[0] <= result.measured <= result.interval[1]
        for result in scored
        if result.interval and result.measured
    ]
    return {
        "rows": len(results),
        "scored": len(errors),
        "mapped_percent": _share([result.unmapped is None for result in scored]),
        **_quantiles(errors),
        "inside_interval_percent": _share(inside),
        "memory": _memory(scored),
        "ranking": ranking_errors(scored),
    }


def summary_over_tables(summaries: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return each table's summary, and the medians over the tables, so that none hides the others.

    Of rows inside their intervals the mean as well: a stack that nobody has measured errs as a whole, so an interval
    that is right holds all rows of most tables and few of some.
    """
    keys = ("median_percent", "p90_percent", "inside_interval_percent")
    values = {key: [summary[key] for summary in summaries.values() if summary[key] is not None] for key in keys}
    middle = {key: statistics.median(figures) if figures else None for key, figures in values.items()}
    inside = values["inside_interval_percent"]
    mean = {"inside_interval_percent": statistics.mean(inside) if inside else None}
    return {"tables": dict(summaries), "median_over_tables": middle, "mean_over_tables": mean}


def _quantiles(errors: Sequence[float]) -> dict[str, float | None]:
    if not errors:
        return {"median_percent": None, "p90_percent": None, "max_percent": None}
    ordered = sorted(errors)
    p90 = ordered[min(len(ordered) - 1, math.ceil(0.9 * len(ordered)) - 1)]
    return {"median_percent": statistics.median(ordered), "p90_percent": p90, "max_percent": ordered[-1]}


def _share(flags: Sequence[bool]) -> float | None:
    return 100 * sum(flags) / len(flags) if flags else None


def _memory(results: Sequence[RowResult]) -> dict[str, Any]:
    """Errors of peak memory; of rows that ran the share called feasible, of those that crashed the share that is not.

    A crashed row counts where its shapes divide: heads over tensor ranks and blocks over stages.
    """
    pairs = [(r.memory, r.measured_memory) for r in results if r.memory and r.measured_memory]
    errors = [100 * abs(guess / truth - 1) for guess, truth in pairs]
    ran = [bool(r.fits) for r in results if r.measured and r.fits is not None]
    crashed = [not r.fits for r in results if "crashed" in r.row.text.get("notes", "") and _divides(r.row)]
    return {
        "rows": len(errors),
        **_quantiles(errors),
        "ran_called_feasible_percent": _share(ran),
        "crashed_called_infeasible_percent": _share(crashed),
    }


def _divides(row: Row) -> bool:
    heads, tensor, layers, stages = (row.numbers.get(c, 1) for c in ("heads", "tp", "layers", "pp"))
    return heads % tensor == 0 and row.numbers.get("kv_heads", heads) % tensor == 0 and layers >= stages


def ranking_errors(results: Sequence[RowResult]) -> dict[str, Any]:
    """Inside groups that differ in configuration only: pairs ordered rightly, and what the predicted best costs.

    Regret: how much slower the predicted best was than the measured best, in per cent, median and largest over groups.
    """
    groups: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    for r in results:
        if r.predicted and r.measured:
            speed = (1 / r.predicted, 1 / r.measured) if r.unit == "step_s" else (r.predicted, r.measured)
            groups.setdefault(tuple(r.row.text.get(c, "") for c in GROUP), []).append(speed)
    right, regrets = [], []
    for speeds in groups.values():
        if len(speeds) < 2:
            continue
        for one, two in combinations(speeds, 2):
            if max(one[1], two[1]) > min(one[1], two[1]) * (1 + APART):
                right.append((one[0] > two[0]) == (one[1] > two[1]))
        best = max(speed for _, speed in speeds)
        regrets.append(100 * (best / max(speeds)[1] - 1))
    return {
        "groups": len(regrets),
        "pairs": len(right),
        "ordered_percent": _share(right),
        "regret_median_percent": statistics.median(regrets) if regrets else None,
        "regret_max_percent": max(regrets) if regrets else None,
    }
