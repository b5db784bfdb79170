"""Cases of the rules in `plan/rules/observe.py`."""

from __future__ import annotations

from typing import Any

from shardwise.model.facts import ModelFacts
from shardwise.plan.draft import World
from tests.plan.rules.jobs import CPU4, FACTS, case

CASES = {
    "sample-prompt": case(
        {"observe": {"sample": False, "sample_prompt": "def "}}, {"observe": {"sample_prompt": "def "}}, "no sample"
    ),
    "sample-tokens": case(
        {"model": {"task": "masked_lm"}, "observe": {"sample_tokens": 9}},
        {"observe": {"sample_tokens": 9}},
        "no sample",
    ),
    **{
        f"hang-{key}": case(
            {"observe": {"hang_report": False, f"hang_{key}": 30}}, {"observe": {f"hang_{key}": 30}}, "is off"
        )
        for key in ("medians", "seconds")
    },
    "profile": case(
        {"observe": {"profile": [90, 101]}, "training": {"steps": 100}},
        {"observe": {"profile": [99, 100]}, "training": {"steps": 100}},
        "[99, 100]",
    ),
}

MORE: list[tuple[str, dict[str, Any], World, ModelFacts]] = [
    ("profile", {"observe": {"profile": [1]}}, CPU4, FACTS),
    ("profile", {"observe": {"profile": [0, 1]}}, CPU4, FACTS),
    ("profile", {"observe": {"profile": [3, 2]}}, CPU4, FACTS),
]
