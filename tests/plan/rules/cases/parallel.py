"""Cases of the rules in `plan/rules/parallel.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardwise.model.facts import ModelFacts
from shardwise.plan.draft import World
from tests.plan.rules.jobs import CUDA4, FACTS, case

CASES = {
    "device": case({"parallel": {"device": "cuda"}}, {"parallel": {"device": "cpu"}}, "run on cpu"),
    "device-fp64": case(
        {"parallel": {"device": "mps"}},
        {"parallel": {"device": "auto"}},
        "summed in fp64: Metal has no fp64, and the ranks run on mps; use device cpu",
        World(1, "mps", 1),
        legal_world=World(1, "cpu", 1),
    ),
    "two-levels": case(
        {"parallel": {"collective_algorithm": "two_level"}},
        {"parallel": {"collective_algorithm": "flat"}},
        "two levels are carried by Gloo, NCCL and the engine, and the ranks run on xpu",
        World(4, "xpu", 2, hosts=2),
    ),
    "backend": case({"parallel": {"ddp_dist_backend": "nccl"}}, {"parallel": {"ddp_dist_backend": "gloo"}}, "use auto"),
    "nccl-shared": case(
        {"parallel": {"ddp_dist_backend": "nccl"}},
        {"parallel": {"ddp_dist_backend": "shardwise"}},
        "4 ranks of a host share 2 GPU(s), and NCCL joins one rank of each; the engine moves their tensors through the "
        "host's memory; use auto or shardwise, or 2 rank(s) a host",
        replace(CUDA4, gpus=2),
    ),
    "world": case(
        {"parallel": {"tensor_parallel_degree": 3}}, {}, "3 does not divide the 4 ranks; use a product of 1, 2"
    ),
    "placement": case(
        {"parallel": {"placement_strategy": "DPP"}}, {"parallel": {"placement_strategy": "TDP"}}, "permutation"
    ),
}

MORE: list[tuple[str, dict[str, Any], World, ModelFacts]] = [
    ("backend", {"parallel": {"ddp_dist_backend": "gloo"}}, CUDA4, FACTS),
    ("backend", {"parallel": {"ddp_dist_backend": "shardwise"}}, World(4, "xpu", 4), FACTS),
    ("backend", {"parallel": {"ddp_dist_backend": "nccl"}}, World(4, "xpu", 4), FACTS),
    ("device", {"parallel": {"device": "cpu"}}, CUDA4, FACTS),
]
