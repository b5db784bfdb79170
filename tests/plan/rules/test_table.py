"""The legality table: every row has a case, and the default job breaks none."""

from __future__ import annotations

from shardwise.plan.draft import World
from shardwise.plan.rules import RULES, rules
from shardwise.words import divisors, one_of
from tests.plan.rules import test_acceleration, test_pipeline, test_running, test_structure
from tests.plan.rules.jobs import resolve_case


def test_every_row_has_a_case_and_a_name_of_its_own() -> None:
    ids = [rule.id for rule in RULES]
    assert len(set(ids)) == len(ids)
    parts = (test_structure, test_running, test_pipeline, test_acceleration)
    assert set(ids) == {id for part in parts for id in part.CASES}
    assert [doc.id for doc in rules()] == ids
    assert all(doc.sentence and doc.fix and doc.keys for doc in rules())


def test_the_default_job_is_legal_on_cpu_and_cuda() -> None:
    for world in (World(1, "cpu", 1), World(2, "cpu", 2), World(8, "cuda", 8)):
        resolve_case({}, world)


def test_words() -> None:
    assert one_of([1]) == "1"
    assert one_of([1, 2]) == "1 or 2"
    assert one_of([1, 2, 4]) == "1, 2 or 4"
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
