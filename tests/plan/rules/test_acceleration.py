"""Rows about what makes one accelerator fast: float8, Liger's kernels, CUDA graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwise.model.facts import ModelFacts
from shardwise.plan.draft import World
from shardwise.plan.rules import running, structure
from tests.plan.rules.jobs import CPU4, CUDA4, FACTS, FULL, case, check_case, check_row

LINEAR = replace(FACTS, linears={f"layers.{i}.{name}": (4096, 4096) for i in range(4) for name in ("up", "down")})
FUSIBLE = replace(FACTS, fusible={"layers.0.norm": "RMS norm"})
SMALL = replace(FACTS, linears={"layers.1.up": (512, 512)})
H100 = World(4, "cuda", 4, "NVIDIA H100", float8=True)
CUDA1 = World(1, "cuda", 1)
GRAPHS = {"model": {"compile": True, "cuda_graphs": True}, "precision": {"compute": "fp32"}}
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
    "graphs-compile": case({"model": {"cuda_graphs": True}}, GRAPHS, "use model.compile true", CUDA1, FACTS),
    "graphs-device": case(GRAPHS, {"model": {"compile": True}}, "the ranks run on cpu"),
    "graphs-alone": case(GRAPHS, {"model": {"compile": True}}, "4 ranks gather weights", CUDA4),
    "graphs-dtype": case({"model": GRAPHS["model"]}, GRAPHS, "cast to bf16", CUDA1),
    "graphs-memory": case({**GRAPHS, "memory": FULL}, GRAPHS, "checkpointing none", CUDA1),
    "liger-model": case({"model": {"liger": True}}, {}, "no module of gpt_neox"),
    "liger-device": case({"model": {"liger": True}}, {}, "the ranks run on cpu", facts=FUSIBLE),
    "liger-installed": case({"model": {"liger": True}}, {}, "shardwise[liger]", CUDA4, FUSIBLE),
    "liger-compile": case(
        {"model": {"liger": True, "compile": True}}, {"model": {"compile": True}}, "use one of them", CUDA4, FUSIBLE
    ),
}

MORE = [
    ("graphs-memory", {**GRAPHS, "training": {"gradient_accumulation": 2}}, CUDA1, FACTS),
    ("graphs-memory", {**GRAPHS, "memory": {"offload_parameters": True}}, CUDA1, FACTS),
    ("fp8-device", {"precision": {"fp8": "torchao"}}, World(4, "cuda", 4, "NVIDIA A100", float8=False), LINEAR),
    ("fp8-device", {"precision": {"fp8": "transformer_engine"}}, CPU4, LINEAR),
    ("fp8-installed", {"precision": {"fp8": "transformer_engine"}}, H100, LINEAR),
    ("fp8-gains", EMULATE, CPU4, replace(LINEAR, linears={"layers.0.up": (4096, 4096), "layers.3.up": (4096, 4096)})),
]


@pytest.mark.parametrize("id", CASES)
def test_row_fires_and_its_neighbour_passes(id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for rows in (running, structure):
        monkeypatch.setattr(rows, "installed", lambda package: not id.endswith("-installed"))
    check_case(id, CASES[id])


@pytest.mark.parametrize(("id", "job", "world", "facts"), MORE)
def test_other_ways_to_break_a_row(id: str, job: dict[str, Any], world: World, facts: ModelFacts) -> None:
    check_row(id, job, world, facts)
