"""The legality table: every row has a case, each case breaks its row alone, and the default job breaks none."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import Any

import pytest

from shardwise.model.facts import ModelFacts
from shardwise.parallel.apply import TRANSFORMS
from shardwise.plan.draft import World
from shardwise.plan.rules import AXIS_RULES, RULES, float8, fused_kernels, rules
from shardwise.words import divisors, one_of
from tests.plan.rules import cases
from tests.plan.rules.jobs import Case, check_case, check_row, resolve_case

SUBJECTS = [module.name for module in pkgutil.iter_modules(cases.__path__)]
CASES: dict[str, dict[str, Case]] = {name: import_module(f"tests.plan.rules.cases.{name}").CASES for name in SUBJECTS}
MORE = [
    other for name in SUBJECTS for other in getattr(import_module(f"tests.plan.rules.cases.{name}"), "MORE", ())
]  # other ways to break a row


@pytest.mark.parametrize(("subject", "id"), [(subject, id) for subject in SUBJECTS for id in CASES[subject]])
def test_row_fires_and_its_neighbour_passes(subject: str, id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for rows in (float8, fused_kernels):
        monkeypatch.setattr(rows, "installed", lambda package: not id.endswith("-installed"))
    check_case(id, CASES[subject][id])


@pytest.mark.parametrize(("id", "job", "world", "facts"), MORE)
def test_other_ways_to_break_a_row(id: str, job: dict[str, Any], world: World, facts: ModelFacts) -> None:
    check_row(id, job, world, facts)


@pytest.mark.parametrize("subject", SUBJECTS)
def test_every_row_of_a_subject_has_a_case(subject: str) -> None:
    rows = import_module(f"shardwise.plan.rules.{subject}").RULES
    assert set(CASES[subject]) == {rule.id for rule in rows}


def test_the_table_holds_every_subject_and_each_row_has_a_name_of_its_own() -> None:
    ids = [rule.id for rule in RULES]
    assert len(set(ids)) == len(ids)
    assert set(ids) == {id for subject in SUBJECTS for id in CASES[subject]}
    assert {rule.id for rows in AXIS_RULES.values() for rule in rows} <= set(ids)
    assert [doc.id for doc in rules()] == ids
    assert all(doc.sentence and doc.fix and doc.keys for doc in rules())


def test_a_transform_has_its_rules_under_its_own_name() -> None:
    without_rules = {"boundary_shapes", "materialize"}  # which follow from others
    names = {transform.name for transform in TRANSFORMS}
    assert names - without_rules <= set(SUBJECTS)


def test_the_default_job_is_legal_on_cpu_and_cuda() -> None:
    for world in (World(1, "cpu", 1), World(2, "cpu", 2), World(8, "cuda", 8)):
        resolve_case({}, world)


def test_words() -> None:
    assert one_of([1]) == "1"
    assert one_of([1, 2]) == "1 or 2"
    assert one_of([1, 2, 4]) == "1, 2 or 4"
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
