"""The reference page of the sweep over transformers' types: `benchmarks.coverage --record FILE --page PAGE` writes it.

It says what ran and nothing else: a cell that the record lacks is shown as not run. Of other versions of transformers
than the installed one it has the counts.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import transformers

from benchmarks.coverage import (
    AGREES,
    FAULTS,
    LAYOUTS,
    NO_TOY,
    OTHER_MAPPINGS,
    REFUSED,
    TASKS,
    CoverageCell,
    all_types,
    popular_types,
)

GENERATED = "<!-- Written by `python -m benchmarks.coverage --record FILE --page PAGE` from a run; do not edit. -->"
NOT_RUN = "not run"
SHOWN = {AGREES: "yes", REFUSED: "no", NOT_RUN: ""}
MOST_TYPES = 12  # that are named beside a reason
Cases = Sequence[tuple[str, str]]


def page(versions: Mapping[str, Sequence[CoverageCell]]) -> str:
    """Return the page of a record's cells, which are given by version of transformers."""
    own = versions.get(transformers.__version__, ())
    others = {version: cells for version, cells in versions.items() if version != transformers.__version__}
    lines = [line for version, cells in sorted(others.items()) for line in _other_version(version, cells)]
    return "\n".join([GENERATED, "", *_lines(own), *lines]).rstrip() + "\n"


def _lines(cells: Sequence[CoverageCell]) -> Iterator[str]:
    found = {cell.key: cell for cell in cells}
    without = {cell.key[:2] for cell in cells if cell.outcome == NO_TOY}
    tasks = [task for task in TASKS if any(cell.task == task for cell in cells)]
    cases = [case for case in all_types(tasks) if case not in without]
    yield "# Model types: what agrees and what is refused\n"
    yield from _conditions(cells, [task for task in TASKS if task not in tasks])
    yield f"## All {len(cases)}\n"
    yield from _counts(cases, found)
    popular = [case for case in popular_types() if case in set(cases)]
    yield f"## The {len(popular)} popular ones\n"
    yield from _counts(popular, found)
    yield "## Why not\n"
    yield from _reasons(cells)
    yield "## Types\n"
    for task in tasks:
        yield from _types(task, [case for case in cases if case[0] == task], found)
    yield from _other_types(cells)
    yield from _without_toy(cells)


def _other_version(version: str, cells: Sequence[CoverageCell]) -> Iterator[str]:
    """Yield the counts of another version of transformers, and what is at fault there."""
    without = {cell.key[:2] for cell in cells if cell.outcome == NO_TOY}
    cases = list(dict.fromkeys(cell.key[:2] for cell in cells if cell.task in TASKS and cell.key[:2] not in without))
    found = {cell.key: cell for cell in cells}
    popular = [case for case in popular_types() if case in set(cases)]
    yield f"## transformers {version}: {len(cases)} types\n"
    yield f"Commits {_commits(cells)}.\n"
    if not any(cell.seconds for cell in cells):  # of a run of the time before they were recorded
        yield "Attention was `eager` there, and `auto` under context.\n"
    yield from _counts(cases, found)
    yield f"Of these, the {len(popular)} popular ones:\n"
    yield from _counts(popular, found)
    faults = [cell for cell in cells if cell.outcome in FAULTS]
    if faults:
        rows = ((cell.task, f"`{cell.model_type}`", cell.layout, cell.outcome) for cell in faults)
        yield from _table(("task", "type", "layout", "at fault"), rows)


def _commits(cells: Sequence[CoverageCell]) -> str:
    counts = Counter(cell.commit for cell in cells)
    return ", ".join(f"{commit} ({count} cells)" for commit, count in counts.items())


def _conditions(cells: Sequence[CoverageCell], left_out: Sequence[str]) -> Iterator[str]:
    yield "A toy of each type of transformers' mappings that runs at toy size, on each layout of two or four CPU"
    yield "ranks in fp64 (fp32 where the model computes in no other). Attention is `auto`, as where a job says nothing."
    yield "Yes: one step agrees with one process ([how](../how-to/verify.md)). No: refused by name before anything"
    yield "starts, by `doctor`, `--print-plan` and `train` alike. Empty: not run yet.\n"
    yield f"transformers {transformers.__version__}, torch {torch.__version__}; commits {_commits(cells)}.\n"
    if left_out:
        yield f"Tasks that no run has tried yet: {', '.join(f'`{task}`' for task in left_out)}.\n"


def _counts(cases: Cases, found: dict[tuple[str, str, str], CoverageCell]) -> Iterator[str]:
    outcomes = (AGREES, REFUSED, *FAULTS, NOT_RUN)
    rows = []
    for layout in LAYOUTS:
        counts = Counter(_outcome(found, case, layout) for case in cases)
        rows.append((layout, *(str(counts[outcome]) for outcome in outcomes)))
    yield from _table(("layout", *outcomes), rows)


def _outcome(found: dict[tuple[str, str, str], CoverageCell], case: tuple[str, str], layout: str) -> str:
    cell = found.get((*case, layout))
    return NOT_RUN if cell is None else cell.outcome


def _reasons(cells: Sequence[CoverageCell]) -> Iterator[str]:
    """Yield a table of the reasons of refusals, those that differ in names of modules and types alone together."""
    types: dict[tuple[str, str], list[str]] = defaultdict(list)
    for cell in cells:
        if cell.outcome == REFUSED and cell.task in TASKS:
            types[cell.layout, _kind(cell)].append(cell.model_type)
    order = sorted(types, key=lambda key: (list(LAYOUTS).index(key[0]), -len(types[key])))
    rows = ((layout, reason, _named(types[layout, reason])) for layout, reason in order)
    yield from _table(("layout", "reason", "types"), rows)


def _kind(cell: CoverageCell) -> str:
    """Return a refusal's reason without the key, the way out, lines of code, and names of this type and its modules."""
    reason = cell.reason.partition(": ")[2] or cell.reason
    reason = reason.partition("; ")[0]
    reason = re.sub(r" \([^()]*\.py:\d+\)", "", reason)  # a place in this machine's transformers, which doctor says
    reason = re.sub(r"'[\w.]+'", "a module", reason)
    reason = re.sub(r"\b\w+(For[A-Z]\w+|LMHeadModel)\b", "the model", reason)
    return re.sub(rf"\b{re.escape(cell.model_type)}\b", "the type", reason)


def _named(types: Iterable[str]) -> str:
    names = list(dict.fromkeys(types))
    more = f" and {len(names) - MOST_TYPES} more" if len(names) > MOST_TYPES else ""
    return ", ".join(f"`{name}`" for name in names[:MOST_TYPES]) + more


def _types(task: str, cases: Cases, found: dict[tuple[str, str, str], CoverageCell]) -> Iterator[str]:
    yield f"### {task}\n"
    rows = []
    for case in sorted(cases):
        outcomes = (_outcome(found, case, layout) for layout in LAYOUTS)
        rows.append((f"`{case[1]}`", *(SHOWN.get(outcome, f"**{outcome}**") for outcome in outcomes)))
    yield from _table(("type", *LAYOUTS), rows)


def _other_types(cells: Sequence[CoverageCell]) -> Iterator[str]:
    """Yield what becomes of types for which there is no task."""
    yield "### Without a task\n"
    yield "They are refused, with the tasks that there are and the way by a factory"
    yield "([a module of your own](../how-to/own-module.md)).\n"
    rows = []
    for mapping in OTHER_MAPPINGS:
        of_mapping = [cell for cell in cells if cell.task == mapping]
        counts = Counter(cell.outcome for cell in of_mapping)
        rows.append((mapping, *(str(counts[outcome]) for outcome in (REFUSED, *FAULTS)), _named_all(of_mapping)))
    yield from _table(("mapping", REFUSED, *FAULTS, "types"), rows)


def _named_all(cells: Iterable[CoverageCell]) -> str:
    return ", ".join(f"`{cell.model_type}`" for cell in cells)


def _without_toy(cells: Sequence[CoverageCell]) -> Iterator[str]:
    """Yield the types of which transformers itself cannot run a toy."""
    yield "### Without a toy\n"
    yield "transformers itself does not run a small config of these with token ids alone, in its words:\n"
    rows = ((cell.task, f"`{cell.model_type}`", cell.reason[:160]) for cell in cells if cell.outcome == NO_TOY)
    yield from _table(("task", "type", "transformers"), sorted(rows))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    for row in (head, ["---"] * len(head), *rows):
        yield f"| {' | '.join(' '.join(text.split()).replace('|', chr(92) + '|') for text in row)} |"
    yield ""
