"""Partly trained models compute what one process computes, and keep no gradient and no state of what is frozen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.job.schema import Job
from shardwise.testing.world import WorldPool
from shardwise.training.setup import set_up
from shardwise.training.step import train_step
from tests.parity.jobs import check_agrees, make_job, tensor_job

LAYOUTS: dict[str, dict[str, Any]] = {
    "shard 2": {},
    "tensor 2": {"tensor_parallel_degree": 2},
    "pipeline 2": {"pipeline_parallel_degree": 2},  # its first stage trains nothing
    "context 2": {"context_parallel_degree": 2},
    "zero-1": {"shard_optimizer_state": True},
}


@pytest.mark.parametrize(
    "layout",
    [name if name == "pipeline 2" else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS],
)
def test_frozen_layers(world_pool: WorldPool, corpora: Path, layout: str) -> None:
    freeze = ["transformer.wte", "transformer.wpe", "transformer.h.0", "transformer.h.1.mlp.c_fc.weight"]
    job = tensor_job(corpora, "gpt2", tied=False, layers=2, model={"freeze": freeze}, parallel=LAYOUTS[layout])
    check_agrees(world_pool, 2, job)


def state_of(job: Job) -> dict[str, tuple[bool, bool]]:
    """Train a step; return whether each parameter has a gradient, and an optimizer's state."""
    run = set_up(job, torch.device("cpu"))
    seen: dict[str, bool] = {}
    original = run.optimizer.step

    def step() -> None:
        seen.update({entry.name: entry.local_gradient is not None for entry in run.model.tensor_map})
        original()

    run.optimizer.step = step  # type: ignore[method-assign]
    train_step(run.model, run.objective, run.stream.batches(0), run.optimizer, run.scaler, 0)
    kept = {entry.name for entry, local in run.optimizer.locals if run.optimizer.inner.state.get(local)}
    return {name: (has_gradient, name in kept) for name, has_gradient in seen.items()}


def test_frozen_parameters_have_no_gradient_and_no_state(world_pool: WorldPool, corpora: Path) -> None:
    job = make_job(corpora, layers=1, tied=False, model={"freeze": [".*attn", "lm_head"]})
    for state in world_pool.run(2, state_of, job):
        for name, held in state.items():
            assert held == ((False, False) if ".attn." in name or name.startswith("lm_head") else (True, True)), name
