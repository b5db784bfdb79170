"""Constants for a table of which nothing is known: refitted without its rows, its software and its models.

What is left out of a table's constants are the rows of every release of its software, in whatever table they stand, and
the rows of models that it names. Of a table of experts, which software there is one of, one release is scored at a time
and is all that is left out. What software, models and releases are is read from the cells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

from shardwise.planner.constants.inventory import Constants, shipped, software_of
from shardwise.planner.published.calibrate import Sample, fit, samples, shipped_rows
from shardwise.planner.published.calibrate_solve import COARSE
from shardwise.planner.published.row import Row
from shardwise.planner.published.row_model import model_key


def constants_without(rows: Sequence[Row]) -> Mapping[str, Constants]:
    """Return by stack the constants with which the rows of a table are scored."""
    stacks = frozenset(row.text["stack"] for row in rows)
    if any(row.has_experts for row in rows):
        return {stack: _refitted(frozenset({stack}), frozenset(), frozenset()) for stack in stacks}
    models = frozenset(model_key(row.text["model"]) for row in rows)
    constants = _refitted(stacks, frozenset(map(software_of, stacks)), models)
    return dict.fromkeys(stacks, constants)


@cache
def _known() -> tuple[Sample, ...]:
    return tuple(samples(shipped_rows()))


@cache
def _refitted(stacks: frozenset[str], software: frozenset[str], models: frozenset[str]) -> Constants:
    """Constants fitted on what is left. A stack none of whose rows is left out keeps its memory, and its way to cut and
    to recompute; all that says how long it takes is fitted again."""
    left = [sample for sample in _known() if not _is_out(sample.row, stacks, software, models)]
    untouched = {
        stack: given for stack, given in shipped().stacks.items() if _rows_of(left, stack) == _rows_of(_known(), stack)
    }
    return fit(left, untouched, COARSE)


def _rows_of(given: Sequence[Sample], stack: str) -> int:
    return sum(sample.row.text["stack"] == stack for sample in given)


def _is_out(row: Row, stacks: frozenset[str], software: frozenset[str], models: frozenset[str]) -> bool:
    stack = row.text["stack"]
    return stack in stacks or software_of(stack) in software or model_key(row.text["model"]) in models
