"""Cases of the rules in `plan/rules/parallel.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardwise.model.facts import ModelFacts
from shardwise.plan.draft import World
from tests.plan.rules.jobs import CUDA4, FACTS, case

CASES = {
    "device": case({"parallel": {"device": "cuda"}}, {"parallel": {"device": "cpu"}}, "run on cpu"),
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
    ("device", {"parallel": {"device": "cpu"}}, CUDA4, FACTS),
]
