"""Cases of the rules in `plan/rules/checkpointing.py`."""

from __future__ import annotations

from typing import Any

from shardwise.model.facts import ModelFacts
from shardwise.plan.draft import World
from tests.plan.rules.cases.expert import EXPERT, STACKS
from tests.plan.rules.jobs import CPU4, FACTS, FLAT, FULL, OTHER_ARGUMENTS, case

CASES = {
    "checkpointing-blocks": case({"memory": FULL}, {"memory": FULL}, "use none", CPU4, FLAT, FACTS),
    "keep-expert-rows": case(
        {"memory": {**FULL, "keep_expert_rows": True}},
        {"memory": {**FULL, "keep_expert_rows": True}, **EXPERT},
        "expert_parallel_degree to 2 or more",
        CPU4,
        STACKS,
    ),
    "checkpoint-every": case(
        {"memory": {"checkpoint_every": 2}}, {"memory": {**FULL, "checkpoint_every": 2}}, "every=2"
    ),
    "checkpoint-strategy": case(
        {"memory": {"checkpoint_strategy": "contiguous"}},
        {"memory": {**FULL, "checkpoint_strategy": "contiguous"}},
        "activation_checkpointing to full",
    ),
    "checkpoint-strategy-name": case(
        {"memory": {**FULL, "checkpoint_strategy": "group_0"}},
        {"memory": {**FULL, "checkpoint_strategy": "group_1"}},
        "group_N",
    ),
    "checkpoint-grouping": case(
        {"memory": {**FULL, "checkpoint_every": 2, "checkpoint_strategy": "group_2"}},
        {"memory": {**FULL, "checkpoint_every": 2}},
        "checkpoint_every=2, memory.checkpoint_strategy=group_2",
    ),
    "checkpoint-every-blocks": case(
        {"memory": {**FULL, "checkpoint_every": 5}}, {"memory": {**FULL, "checkpoint_every": 4}}, "use at most 4"
    ),
    "checkpoint-group-blocks": case(
        {"memory": {**FULL, "checkpoint_strategy": "group_5"}},
        {"memory": {**FULL, "checkpoint_strategy": "group_4"}},
        "at most 4",
    ),
    "checkpoint-arguments": case(
        {"memory": {**FULL, "checkpoint_strategy": "group_2"}}, {"memory": FULL}, "use each", CPU4, OTHER_ARGUMENTS
    ),
}

MORE: list[tuple[str, dict[str, Any], World, ModelFacts]] = [
    ("checkpoint-strategy-name", {"memory": {**FULL, "checkpoint_strategy": "group_x"}}, CPU4, FACTS),
    ("keep-expert-rows", {"memory": {"keep_expert_rows": True}, **EXPERT}, CPU4, STACKS),
    ("checkpoint-arguments", {"memory": {**FULL, "checkpoint_strategy": "contiguous"}}, CPU4, OTHER_ARGUMENTS),
]
