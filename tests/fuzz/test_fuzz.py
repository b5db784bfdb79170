"""2,000 drawn modules: each trains as in plain torch, or is refused by name before its first step.

A hundred run by default, where one rank studies each for all; the others as slow tests, as in a run. A module is its
seed: `python -m tests.fuzz SEED` tries it again.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.testing.world import WorldPool
from tests.fuzz.recipes import Recipe, draw
from tests.fuzz.trials import Outcome, try_all
from tests.habits.table import SHARDS
from tests.habits.trial import Trial

MODULES, DEFAULT = 2000, 100
RIGHT = Trial(parameters=1e-12, losses=1e-12, steps=3)
REFUSED = Trial(refusal="blocks.0 of Drawn is refused")


def chunks(first: int, end: int, size: int) -> list[range]:
    return [range(start, min(start + size, end)) for start in range(first, end, size)]


def name_of(seeds: range) -> str:
    return f"{seeds.start}-{seeds.stop - 1}"


def check(pool: WorldPool, seeds: range, directory: Path, study_together: bool = False) -> list[Outcome]:
    outcomes = list(try_all(pool, [draw(seed) for seed in seeds], directory, study_together))
    assert len(outcomes) == len(seeds)
    wrong = [str(outcome) for outcome in outcomes if outcome.fault]
    assert not wrong, "\n\n".join(wrong)
    return outcomes


@pytest.mark.parametrize("seeds", chunks(0, DEFAULT, 4), ids=name_of)
def test_drawn_modules_are_right_or_refused(world_pool: WorldPool, tmp_path: Path, seeds: range) -> None:
    check(world_pool, seeds, tmp_path, study_together=True)  # which halves their time


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seeds", chunks(DEFAULT, MODULES, 50), ids=name_of)
def test_more_drawn_modules_are_right_or_refused(world_pool: WorldPool, tmp_path: Path, seeds: range) -> None:
    outcomes = check(world_pool, seeds, tmp_path)
    assert sum(not outcome.refusal for outcome in outcomes) > len(outcomes) / 3, "too many are refused"


def test_a_seed_draws_the_same_module_again() -> None:
    assert draw(3) == draw(3) != draw(4)


@pytest.mark.parametrize(
    ("trials", "failure", "fault"),
    [
        ([RIGHT, RIGHT], "", ""),
        ([REFUSED, REFUSED], "", ""),
        ([RIGHT, REFUSED], "", "refused late or by some"),
        ([Trial(refusal="late", steps=1)] * 2, "", "refused late or by some"),
        ([RIGHT, Trial(parameters=1e-6, losses=0, steps=3)], "", "other numbers"),
        ([Trial(parameters=float("nan"), losses=0, steps=3)], "", "other numbers"),
        ([], "rank 0 raised KeyError", "rank 0 raised KeyError"),
    ],
)
def test_what_is_a_fault(trials: list[Trial], failure: str, fault: str) -> None:
    recipe = Recipe(0, "Stack", (), SHARDS, {})
    assert Outcome(recipe, trials, failure).fault == fault
