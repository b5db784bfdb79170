"""Each habit of building a module comes to what the table says: numbers of plain torch, or a refusal by name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.testing.world import WorldPool
from tests.habits import keeping, modules
from tests.habits.table import HABITS, HALF, LAYOUTS, Habit
from tests.habits.trial import Trial, make_job, try_module
from tools.habits import PAGE, page_with_table

ROUNDED = 3e-2  # of losses in bf16


def cases(quick: bool) -> Iterator[tuple[Habit, str]]:
    for habit in HABITS:
        for layout in LAYOUTS:
            if layout not in habit.untried and (layout in habit.quick or layout == first_refusal(habit)) == quick:
                yield habit, layout


def first_refusal(habit: Habit) -> str | None:
    return next((layout for layout in habit.refused if layout not in habit.untried), None)


def check(pool: WorldPool, directory: Path, habit: Habit, layout: str) -> None:
    ranks, sections = LAYOUTS[layout]
    keys = {name: {**sections.get(name, {}), **habit.keys.get(name, {})} for name in sections.keys() | habit.keys}
    trials = pool.run(ranks, try_module, make_job(str(directory), habit.module, keys))
    for trial in trials:
        assert outcome_agrees(trial, habit, layout), trial


def outcome_agrees(trial: Trial, habit: Habit, layout: str) -> bool:
    if layout in habit.refused:
        return re.search(habit.refused[layout], trial.refusal) is not None
    return trial.losses < ROUNDED if layout == HALF else trial.parameters < habit.exact


@pytest.mark.sampled(24)
@pytest.mark.parametrize(("habit", "layout"), cases(quick=True), ids=str)
def test_a_habit_comes_to_what_the_table_says(world_pool: WorldPool, corpora: Path, habit: Habit, layout: str) -> None:
    check(world_pool, corpora, habit, layout)


@pytest.mark.slow
@pytest.mark.parametrize(("habit", "layout"), cases(quick=False), ids=str)
def test_a_habit_comes_to_it_on_every_layout(world_pool: WorldPool, corpora: Path, habit: Habit, layout: str) -> None:
    check(world_pool, corpora, habit, layout)


BESIDE_VALUES = "what a constructor keeps that runs with values alone"
KEPT = [
    Habit("DerivedBesideValues", BESIDE_VALUES),
    Habit(
        "SharedBesideValues",
        BESIDE_VALUES,
        refused=dict.fromkeys(LAYOUTS, r"kept of SharedBesideValues \(.*keeping.py:\d+\) keeps a tensor made from"),
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != HALF])
@pytest.mark.parametrize("habit", KEPT, ids=str)
def test_what_is_kept_of_values(world_pool: WorldPool, corpora: Path, habit: Habit, layout: str) -> None:
    check(world_pool, corpora, habit, layout)


def test_every_module_has_a_row_and_every_refusal_a_remedy() -> None:
    assert all(hasattr(modules, habit.module) or hasattr(keeping, habit.module) for habit in HABITS)
    assert all(bool(habit.refused) == bool(habit.remedy) for habit in HABITS)


def test_the_page_shows_the_table() -> None:
    text = PAGE.read_text()
    assert page_with_table(text) == text, "run `python -m tools.habits`"
