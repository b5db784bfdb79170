"""A resolved plan and synthetic records for the tests of this room."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

from shardwise.job.axes import Axis
from shardwise.job.capability import SUPPORTED
from shardwise.job.schema import Job
from shardwise.model.facts import BlockFacts, ModelFacts
from shardwise.plan.plan import Plan, World, resolve

FACTS = ModelFacts(
    family="gpt_neox",
    parameters=4_200_000,
    embedding_parameters=524_288,
    blocks=tuple(BlockFacts(f"gpt_neox.layers.{i}", 789_760) for i in range(4)),
    capabilities=dict.fromkeys(Axis, SUPPORTED),
    hidden_size=256,
    layers=4,
    attention_heads=8,
    key_value_heads=8,
    intermediate_size=1024,
    vocabulary_size=2048,
    max_positions=512,
    head="embed_out",
)


SESSION: Any = SimpleNamespace(notes=(), rank=0, steps_done=0)  # as far as observers look


def make_plan(workers: int = 2, accelerator: str = "", **sections: Any) -> Plan:
    device = "cuda" if accelerator else "cpu"
    job = Job.model_validate({**sections, "parallel": {"workers": workers, **sections.get("parallel", {})}})
    return resolve(job, World(workers, device, workers, accelerator), FACTS)


def step_record(step: int, ranks: int = 2, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "loss": 3.0 + 5.0 * math.exp(-step / 60) + 0.05 * math.sin(step * 1.7),
        "grad_norm": 0.4 + 2.0 * math.exp(-step / 20) + 0.08 * math.cos(step * 2.3),
        "learning_rate": 3e-3 * min(step / 20, 0.1 + 0.45 * (1 + math.cos(math.pi * step / 300))),
        "tokens": 4096 * step,
        "tokens_per_second": 12_345.6 + 300 * math.sin(step * 0.9),
        "tflops_per_rank": 0.123 + 0.003 * math.sin(step * 0.9),
        "smp_tflops_per_rank": 0.164,
        "mfu": None,
        "peak_memory_bytes": [(412 + 3 * rank) * 2**20 for rank in range(ranks)],
        "skipped": False,
        "seconds": 0.33,
        **more,
    }
