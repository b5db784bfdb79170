"""Cases of the rules in `plan/rules/routers.py`."""

from __future__ import annotations

from dataclasses import replace

from tests.plan.rules.jobs import CPU4, FACTS, case

ROUTED = replace(
    FACTS,
    expert_stacks={"layers.0.experts": 8, "layers.1.experts": 8},
    routers={"layers.0.experts": ("layers.0.gate", 0), "layers.1.experts": ("layers.1.gate", 0)},
    balancing_coefficient=0.01,
)
GLOBAL = {"router": {"balancing_loss": "global"}}
SEQUENCE = {"router": {"balancing_loss": "sequence"}}
MODEL = {"router": {"balancing_loss": "model"}, "training": {"microbatch_size": 1}}

CASES = {
    "router-model": case(GLOBAL, GLOBAL, "has no router that transformers records", CPU4, FACTS, ROUTED),
    "router-coefficient": case(
        GLOBAL, GLOBAL, "set router.balancing_coefficient", CPU4, replace(ROUTED, balancing_coefficient=0.0), ROUTED
    ),
    "router-whole-sequences": case(
        SEQUENCE | {"parallel": {"context_parallel_degree": 2}}, SEQUENCE, "where their tokens are whole", CPU4, ROUTED
    ),
    "router-all-layers": case(
        MODEL | {"parallel": {"pipeline_parallel_degree": 2}}, MODEL, "which no stage has", CPU4, ROUTED
    ),
    "router-microbatch": case(MODEL | {"training": {}}, MODEL, "its size has to be given", CPU4, ROUTED),
    "router-idle": case(
        {"router": {"balancing_coefficient": 0.1}},
        {"router": {"balancing_loss": "global", "balancing_coefficient": 0.1}},
        "there is no balancing loss",
        CPU4,
        ROUTED,
    ),
    "router-bias": case(
        {"router": {"bias_update_rate": 0.001}},
        {"router": {"bias_update_rate": 0.001}},
        "has no router with e_score_correction_bias that transformers records",
        CPU4,
        ROUTED,
        replace(ROUTED, router_biases={"layers.0.experts": "layers.0.gate.e_score_correction_bias"}),
    ),
}
