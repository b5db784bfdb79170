"""Cases of the rules in `plan/rules/training.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardwise.model.facts import ModelFacts
from shardwise.plan.draft import World
from tests.plan.rules.jobs import CPU4, FACTS, case

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
]
