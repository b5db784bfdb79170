"""Cases of the rules in `plan/rules/training.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardwise.model.facts import ModelFacts
from shardwise.plan.draft import World
from tests.plan.rules.jobs import CPU4, FACTS, case


def growing(*stages: tuple[int, int], **keys: Any) -> dict[str, Any]:
    """A job of 16 sequences a step behind stages of (sequences a step, samples with which they are over)."""
    schedule = [{"sequences_per_step": size, "until_samples": end} for size, end in stages]
    return {"training": {"batch_size_schedule": schedule, "sequences_per_step": 16, **keys}}


TOKENS = {"training": {"batch_size_schedule": [{"sequences_per_step": 8, "until_tokens": 4096}]}}

CASES = {
    "epochs-steps": case(
        {"training": {"epochs": 2, "steps": 9}}, {"training": {"epochs": 2}}, "leave one of the two out"
    ),
    "tokens-per-step": case(
        {"training": {"tokens_per_step": 1000}}, {"training": {"tokens_per_step": 1024}}, "use 768 or 1024"
    ),
    "step-size": case(
        {"training": {"tokens_per_step": 4096, "sequences_per_step": 8}},
        {"training": {"tokens_per_step": 4096, "sequences_per_step": 16}},
        "sequences_per_step=8",
    ),
    "batch-size-end": case(
        {"training": {"batch_size_schedule": [{"sequences_per_step": 8}]}}, TOKENS, "one of until_samples and"
    ),
    "batch-size-tokens": case(
        {**TOKENS, "data": {"factory": "a:b"}}, {**growing((8, 32)), "data": {"factory": "a:b"}}, "give until_samples"
    ),
    "batch-size-order": case(
        growing((4, 10), (8, 12)),
        growing((4, 10), (8, 13)),
        "before it begins, with sample 12; use until_samples of at",
    ),
    "batch-size-grows": case(
        growing((4, 16), (16, 32)), growing((4, 16), (8, 32)), "16 sequences is followed by one of 16"
    ),
    "batch-size-run": case(
        growing((8, 33), steps=5), growing((8, 32), steps=5), "the run has 5 steps, and steps of 16 sequences begin"
    ),
    "batch-size-ranks": case(growing((3, 30)), growing((4, 30)), "begin with at least 4 sequences a step"),
    "batch-size-microbatch": case(
        growing((4, 32), microbatch_size=2), growing((4, 32), microbatch_size=1), "use training.microbatch_size 1 or"
    ),
    "idle-ranks": case(
        {"training": {"sequences_per_step": 3}}, {"training": {"sequences_per_step": 4}}, "at least 4 sequences"
    ),
    "microbatch": case(
        {"training": {"microbatch_size": 5}},
        {"training": {"microbatch_size": 4}},
        "gives each data rank 4; use at most 4",
    ),
    "accumulation": case(
        {"training": {"microbatch_size": 2, "gradient_accumulation": 3, "sequences_per_step": 16}},
        {"training": {"microbatch_size": 2, "gradient_accumulation": 2, "sequences_per_step": 16}},
        "use gradient_accumulation 2",
    ),
    "coupled-rows": case(
        {"training": {"sequences_per_step": 16}},
        {"training": {"sequences_per_step": 16, "microbatch_size": 2}},
        "set training.microbatch_size, such as 4",
        CPU4,
        replace(FACTS, couples_rows=True),
    ),
}

MORE: list[tuple[str, dict[str, Any], World, ModelFacts]] = [
    ("accumulation", {"training": {"gradient_accumulation": 3}}, CPU4, FACTS),  # 4 a rank in 3: 2 + 2 + nothing
    ("idle-ranks", {}, World(32, "cpu", 32), FACTS),
    ("batch-size-microbatch", growing((4, 32), gradient_accumulation=2), CPU4, FACTS),
    ("coupled-rows", {}, CPU4, replace(FACTS, drops_by_microbatch=True)),
]
