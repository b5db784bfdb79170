"""`verify` agrees with each habit of building a module wherever it trains, or refuses it by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.errors import ModelError
from shardwise.testing.comparison import VerifyReport
from shardwise.testing.world import WorldPool
from tests.habits.table import HABITS, LAYOUTS, Habit
from tests.habits.trial import make_job
from tests.parity.jobs import verify_one

STEPS = 2
CASES = [(habit, layout) for habit in HABITS for layout in habit.works() if layout not in habit.untried]


def verify_or_refusal(*settings: object) -> VerifyReport | str | None:
    """Return the report of rank 0, or the message of the error that every rank raises."""
    try:
        return verify_one(make_job(*settings), STEPS)  # type: ignore[arg-type]
    except ModelError as error:
        return str(error)


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("habit", "layout"), CASES, ids=str)
def test_verify_agrees_or_refuses(world_pool: WorldPool, corpora: Path, habit: Habit, layout: str) -> None:
    ranks, sections = LAYOUTS[layout]
    keys = {name: {**sections.get(name, {}), **habit.keys.get(name, {})} for name in sections.keys() | habit.keys}
    answers = world_pool.run(ranks, verify_or_refusal, str(corpora), habit.module, keys)
    if habit.changes:
        assert all(f"{habit.module} (" in str(answer) for answer in answers)
        assert all("One process runs more forwards than the job" in str(answer) for answer in answers)
        return
    report = answers[0]
    assert isinstance(report, VerifyReport), report
    assert report.agrees, (report.first, report.diagnosis)
