"""The positions by which TFLOPs of a step are counted."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.job.schema import Job
from shardwise.training.step_record import _positions
from tests.plan.rules.jobs import FACTS

SEQUENCES, LENGTH, COUNTED = 4, 16, 7
ALL = SEQUENCES * LENGTH
FACTORY = {"factory": "a:b"}


@pytest.mark.parametrize(
    ("sections", "facts", "has_data", "positions"),
    [
        ({"model": {"task": "masked_lm"}}, {}, True, ALL),
        ({"data": {"isolate_documents": True}}, {}, True, ALL),
        ({"model": {"task": "seq2seq_lm"}}, {}, True, COUNTED),
        ({}, {}, False, COUNTED),  # a loop of one's own
        ({}, {"returns_logits": False}, True, COUNTED),
        ({"data": FACTORY}, {}, True, COUNTED),
        ({"data": {**FACTORY, "sequence_length": LENGTH}}, {"classifies": True}, True, ALL),
        ({"data": FACTORY}, {"classifies": True}, True, COUNTED),
        ({"data": FACTORY}, {"sample_positions": 5}, True, SEQUENCES * 5),
        ({"data": {"format": "chat", "path": "a"}}, {}, True, SEQUENCES * 2 * LENGTH),
    ],
)
def test_positions_are_those_that_are_computed(
    sections: dict[str, Any], facts: dict[str, Any], has_data: bool, positions: int
) -> None:
    plan = SimpleNamespace(job=Job.model_validate(sections), sequence_length=2 * LENGTH)
    given = object() if has_data else None
    assembled: Any = SimpleNamespace(plan=plan, facts=replace(FACTS, **facts), given_data=given)
    assert _positions(assembled, SEQUENCES, LENGTH, COUNTED) == positions
