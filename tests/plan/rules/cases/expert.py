"""Cases of the rules in `plan/rules/expert.py`."""

from __future__ import annotations

from dataclasses import replace

from shardwise.job.axes import Axis
from shardwise.job.capability import refused
from tests.plan.rules.jobs import CPU4, CPU6, FACTS, case

STACKS = replace(FACTS, expert_stacks={"layers.0.experts": 8, "layers.1.experts": 6})
EXPERT = {"parallel": {"expert_parallel_degree": 2}}

CASES = {
    "expert-ranks": case(
        {"parallel": {"expert_parallel_degree": 4, "tensor_parallel_degree": 2}},
        EXPERT,
        "shared among the 2 data ranks, which it does not divide; use 1 or 2",
    ),
    "expert-model": case(
        EXPERT, EXPERT, "no stack of experts", CPU4,
        FACTS.with_capabilities({Axis.EXPERT: refused("gpt_neox has no stack of experts")}), STACKS,
    ),
    "expert-number": case(
        {"parallel": {"expert_parallel_degree": 3}}, EXPERT,
        "does not divide the 8 experts of layers.0.experts; use 1 or 2", CPU6, STACKS,
    ),
}  # fmt: skip
