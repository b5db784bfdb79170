"""Cases of the rules in `plan/rules/compile.py`."""

from __future__ import annotations

from typing import Any

from shardwise.model.facts import ModelFacts
from shardwise.plan.draft import World
from tests.plan.rules.jobs import CPU4, CUDA4, FACTS, FLAT, FULL, case

CUDA1 = World(1, "cuda", 1)
GRAPHS = {"model": {"compile": True, "cuda_graphs": True}, "precision": {"compute": "fp32"}}

CASES = {
    "compile-blocks": case(
        {"model": {"compile": True}}, {"model": {"compile": True}}, "no repeated", CPU4, FLAT, FACTS
    ),
    "compile-memory": case(
        {"model": {"compile": True}, "memory": {"activation_checkpointing": "selective"}},
        {"model": {"compile": True}, "memory": FULL},
        "activation_checkpointing=selective",
    ),
    "graphs-compile": case({"model": {"cuda_graphs": True}}, GRAPHS, "use model.compile true", CUDA1, FACTS),
    "graphs-device": case(GRAPHS, {"model": {"compile": True}}, "the ranks run on cpu"),
    "graphs-alone": case(GRAPHS, {"model": {"compile": True}}, "4 ranks gather weights", CUDA4),
    "graphs-dtype": case({"model": GRAPHS["model"]}, GRAPHS, "cast to bf16", CUDA1),
    "graphs-memory": case({**GRAPHS, "memory": FULL}, GRAPHS, "checkpointing none", CUDA1),
}

MORE: list[tuple[str, dict[str, Any], World, ModelFacts]] = [
    ("compile-memory", {"model": {"compile": True}, "memory": {**FULL, "checkpoint_strategy": "group_2"}}, CPU4, FACTS),
    ("compile-memory", {"model": {"compile": True}, "memory": {**FULL, "offload_activations": True}}, CPU4, FACTS),
    ("graphs-memory", {**GRAPHS, "training": {"gradient_accumulation": 2}}, CUDA1, FACTS),
    ("graphs-memory", {**GRAPHS, "memory": {"offload_parameters": True}}, CUDA1, FACTS),
]
