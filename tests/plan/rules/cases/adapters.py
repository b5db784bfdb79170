"""Cases of the rules in `plan/rules/adapters.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardwise.job.schema import Job
from shardwise.model.adapters import with_adapters
from shardwise.model.facts import ModelFacts, StageFacts
from shardwise.model.packed_weights import with_packed_base
from tests.plan.rules.jobs import CPU4, FACTS, Case, case, staged

LINEARS = replace(
    FACTS,
    ties=(("embed_in.weight", "embed_out.weight"),),
    parameter_shapes={"embed_in.weight": (10, 12), "norm.weight": (12,), "layers.0.up.weight": (48, 12)},
    linears={"layers.0.up": (12, 48)},
)
WITH_GATE = replace(LINEARS, read_linears=frozenset({"layers.0.gate"}))
STACK = "layers.0.experts.up"
STACKED = replace(
    LINEARS,
    parameter_shapes={**LINEARS.parameter_shapes, STACK: (4, 48, 12)},
    expert_stacks={"layers.0.experts": 4},
    expert_matrices=(STACK,),
)
SHARED = replace(LINEARS, linears={"layers.0.up": (12, 48), "layers.1.up": (12, 48), "layers.0.down": (48, 12)},
                 ties=(("layers.0.up.weight", "layers.1.up.weight"),))  # fmt: skip
OF_EXPERTS = {"target_parameters": ["experts.up"]}
TRACED = replace(LINEARS, stages=StageFacts(traced=True))


def adapter_case(
    broken: dict[str, Any], legal: dict[str, Any], says: str, facts: ModelFacts = LINEARS, **sections: Any
) -> Case:
    """Return a case whose facts have the adapters that each job asks for."""
    wrong, right = ({"adapter": {"kind": "lora", **keys}, **sections} for keys in (broken, legal))
    settings = [Job.model_validate(job).adapter for job in (wrong, right)]
    adapted = [with_packed_base(with_adapters(facts, asked), asked) for asked in settings]
    return case(wrong, right, says, CPU4, *adapted)


VALUES = {
    "rank": 4, "alpha": 16, "dropout": 0.1, "rslora": True, "target_modules": ["up"],
    "target_parameters": ["experts.up"], "modules_to_save": ["norm"],
    "rank_pattern": {"up": 2}, "alpha_pattern": {"up": 2},
}  # fmt: skip
CASES = {
    **{
        f"adapter-{key.replace('_', '-')}": case({"adapter": {key: value}}, {}, "there is no adapter")
        for key, value in VALUES.items()
    },
    "adapter-freeze": case(
        {"adapter": {"kind": "lora"}, "model": {"freeze": ["norm"]}}, {"model": {"freeze": ["norm"]}},
        "leave model.freeze out", CPU4, LINEARS,
    ),
    "adapter-ties": adapter_case(
        {"modules_to_save": ["embed_out"]},
        {"modules_to_save": ["embed_out", "embed_in"]},
        "is tied to 'embed_in.weight', which would be trained with it; use ['embed_out', 'embed_in']",
    ),
    "adapter-modules": adapter_case(
        {"modules_to_save": ["nrm"]}, {"modules_to_save": ["norm"]}, "did you mean 'norm'?"
    ),
    "adapter-targets": adapter_case({"target_modules": ["upp"]}, {"target_modules": ["up"]}, "did you mean 'up'?"),
    "adapter-shared-weight": adapter_case(
        {}, {"target_modules": ["down"]}, "layers.0.up.weight is layers.1.up.weight too, and merged it would", SHARED
    ),
    "adapter-pattern": adapter_case({"rank_pattern": {"updo": 2}}, {"rank_pattern": {"up": 2}}, "did you mean 'up'?"),
    "adapter-stacks": adapter_case(
        {"target_parameters": ["experts.upp"]}, OF_EXPERTS, "did you mean 'experts.up'?", STACKED
    ),
    "adapter-stack-dora": adapter_case(
        {**OF_EXPERTS, "kind": "dora"}, OF_EXPERTS, "kind lora", STACKED
    ),
    "adapter-stack-dropout": adapter_case(
        {**OF_EXPERTS, "dropout": 0.1}, OF_EXPERTS, "dropout 0", STACKED
    ),
    "adapter-rank-height": adapter_case({"rank": 13}, {"rank": 12}, "use a rank of at most 12"),
    "adapter-traced": case(
        {"adapter": {"kind": "lora"}, **staged()}, staged(), "use pipeline_parallel_degree 1", CPU4,
        with_adapters(TRACED, Job.model_validate({"adapter": {"kind": "lora"}}).adapter), FACTS,
    ),
}  # fmt: skip
MORE = [
    ("adapter-targets", {"adapter": {"kind": "lora", "target_modules": "layers.1.*"}}, CPU4, LINEARS),
    ("adapter-targets", {"adapter": {"kind": "lora", "target_modules": []}}, CPU4, LINEARS),
    ("adapter-targets", {"adapter": {"kind": "lora", "target_modules": ["gate"]}}, CPU4, WITH_GATE),
    ("adapter-targets", {"adapter": {"kind": "lora"}}, CPU4, replace(LINEARS, linears={})),
]
