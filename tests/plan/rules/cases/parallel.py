"""Cases of the rules in `plan/rules/parallel.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardwise.model.facts import ModelFacts
from shardwise.plan.draft import World
from tests.plan.rules.jobs import CUDA4, FACTS, case

MPS = {"parallel": {"device": "mps"}}
ONE_MPS = World(1, "mps", 1)

CASES = {
    "device": case({"parallel": {"device": "cuda"}}, {"parallel": {"device": "cpu"}}, "run on cpu"),
    "device-ranks": case(
        MPS,
        MPS,
        "none of torch's backends moves Metal's tensors, and the ranks run on mps; use workers 1",
        World(2, "mps", 2),
        legal_world=ONE_MPS,
    ),
    "device-fp64": case(
        {**MPS, "precision": {"compute": "fp64"}},
        {**MPS, "precision": {"compute": "fp32"}},
        "Metal has no fp64, and the ranks run on mps; use fp32, or device cpu",
        ONE_MPS,
    ),
    "device-units": case(
        {**MPS, "precision": {"compute": "bf16"}}, MPS, "FSDP2 needs streams, which torch.mps has not", ONE_MPS
    ),
    "device-dropout": case(
        {**MPS, "memory": {"activation_checkpointing": "full"}},
        {**MPS, "memory": {"activation_checkpointing": "full"}, "model": {"attention": "eager"}},
        "keep no state of Metal's generator, and the ranks run on mps; use activation_checkpointing none",
        ONE_MPS,
        replace(FACTS, has_attention_dropout=True),
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
    ("device-units", {**MPS, "memory": {"offload_parameters": True}}, ONE_MPS, FACTS),
    ("backend", {"parallel": {"ddp_dist_backend": "gloo"}}, CUDA4, FACTS),
    ("backend", {"parallel": {"ddp_dist_backend": "shardwise"}}, World(4, "xpu", 4), FACTS),
    ("backend", {"parallel": {"ddp_dist_backend": "nccl"}}, World(4, "xpu", 4), FACTS),
    ("device", {"parallel": {"device": "cpu"}}, CUDA4, FACTS),
]
