"""Cases of the rules in `plan/rules/float8.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardwise.model.facts import ModelFacts
from shardwise.plan.draft import World
from tests.plan.rules.jobs import CPU4, FACTS, case

LINEAR = replace(FACTS, linears={f"layers.{i}.{name}": (4096, 4096) for i in range(4) for name in ("up", "down")})
SMALL = replace(FACTS, linears={"layers.1.up": (512, 512)})
H100 = World(4, "cuda", 4, "NVIDIA H100", float8=True)
EMULATE = {"precision": {"fp8": "emulate"}}

CASES = {
    "fp8-scaling": case(
        {"precision": {"fp8_scaling": "rowwise"}},
        {"precision": {"fp8": "emulate", "fp8_scaling": "rowwise"}},
        "set precision.fp8",
        facts=LINEAR,
    ),
    "fp8-layers": case(
        {"precision": {"fp8_layers": "all"}},
        {"precision": {"fp8": "emulate", "fp8_layers": "all"}},
        "nothing is in float8",
        facts=LINEAR,
    ),
    "fp8-transformer-engine": case(
        {"precision": {"fp8": "transformer_engine", "fp8_scaling": "rowwise"}},
        {"precision": {"fp8": "transformer_engine"}},
        "one scale a tensor here; use precision.fp8_scaling tensorwise, or precision.fp8 torchao",
        H100,
        LINEAR,
    ),
    "fp8-transformer-engine-compile": case(
        {"precision": {"fp8": "transformer_engine"}, "model": {"compile": True}},
        {"precision": {"fp8": "torchao"}, "model": {"compile": True}},
        "cannot see into Transformer Engine; use precision.fp8 torchao",
        H100,
        LINEAR,
    ),
    "fp8-all_gather": case(
        {"precision": {"fp8_all_gather": True}},
        {"precision": {"fp8": "emulate", "fp8_all_gather": True}},
        "nothing is in float8",
        facts=LINEAR,
    ),
    "fp8-gathered": case(
        {"precision": {"fp8": "emulate", "fp8_all_gather": True}, "parallel": {"sharded_data_parallel_degree": 1}},
        {"precision": {"fp8": "emulate", "fp8_all_gather": True}, "parallel": {"sharded_data_parallel_degree": 2}},
        "only sharded parameters are gathered",
        facts=LINEAR,
    ),
    "fp8-device": case(
        {"precision": {"fp8": "torchao"}}, EMULATE, "cpu has no products of float8; GPUs have them", facts=LINEAR
    ),
    "fp8-installed": case(
        {"precision": {"fp8": "torchao"}},
        EMULATE,
        "pip install 'shardwise[fp8]'",
        H100,
        LINEAR,
    ),
    "fp8-compute": case(
        {"precision": {"fp8": "emulate", "compute": "fp16"}},
        {"precision": {"fp8": "emulate", "compute": "bf16"}},
        "computes in fp16, and emulate takes bf16 or fp32",
        facts=LINEAR,
    ),
    "fp8-gains": case(
        EMULATE,
        {"precision": {"fp8": "emulate", "fp8_layers": "all"}},
        "0 of 1 linear layers of the blocks; 1 left: 512 x 512 is too small to gain from tensorwise scaling; use",
        facts=SMALL,
    ),
}

MORE: list[tuple[str, dict[str, Any], World, ModelFacts]] = [
    ("fp8-device", {"precision": {"fp8": "torchao"}}, World(4, "cuda", 4, "NVIDIA A100", float8=False), LINEAR),
    ("fp8-device", {"precision": {"fp8": "transformer_engine"}}, CPU4, LINEAR),
    ("fp8-installed", {"precision": {"fp8": "transformer_engine"}}, H100, LINEAR),
    ("fp8-gains", EMULATE, CPU4, replace(LINEAR, linears={"layers.0.up": (4096, 4096), "layers.3.up": (4096, 4096)})),
]
