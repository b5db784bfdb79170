"""Parameter groups learn and decay as torch's own groups in one process, on every layout, and go on after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.job.schema import Job
from shardwise.testing.world import WorldPool
from shardwise.training.session import Session
from tests.parity.jobs import check_agrees, tensor_job

GROUPS: list[dict[str, Any]] = [
    {"parameters": ["transformer.wte", r"transformer.h.\d+.ln_1"], "learning_rate": 2e-4},
    {"parameters": ["transformer.h.1.mlp"], "learning_rate": 1e-2, "weight_decay": 0.5},
    {"parameters": [".*c_attn.weight"], "weight_decay": 0.0},
]
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "shard 4": (4, {}),
    "shard 2, replica 2": (4, {"sharded_data_parallel_degree": 2}),
    "tensor 2": (2, {"tensor_parallel_degree": 2}),
    "pipeline 2": (2, {"pipeline_parallel_degree": 2}),
    "context 2": (2, {"context_parallel_degree": 2}),
    "zero-1": (2, {"shard_optimizer_state": True}),
}


def group_job(
    corpora: Path, tied: bool = True, optimizer: dict[str, Any] | None = None, **sections: dict[str, Any]
) -> Job:
    optimizer = {"weight_decay": 0.1, "groups": GROUPS, **(optimizer or {})}
    return tensor_job(corpora, "gpt2", tied=tied, layers=2, optimizer=optimizer, **sections)


@pytest.mark.parametrize(
    "layout", [name if name == "pipeline 2" else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_groups(world_pool: WorldPool, corpora: Path, layout: str) -> None:
    ranks, parallel = LAYOUTS[layout]
    check_agrees(world_pool, ranks, group_job(corpora, parallel=parallel))


def rates(job: Job) -> list[dict[str, tuple[float, float]]]:
    """Train two steps; return (learning rate, weight decay) of each parameter on this rank after each of them."""
    with Session(job, device=torch.device("cpu")) as session:
        return [_rates_after(session, batches) for batches in session.batches()]


def _rates_after(session: Session, batches: Any) -> dict[str, tuple[float, float]]:
    session.step(batches)
    names = {id(local): entry.name for entry, local in session.optimizer.locals}
    groups = session.optimizer.inner.param_groups
    return {names[id(p)]: (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}


def test_rates_follow_the_schedule(world_pool: WorldPool, corpora: Path) -> None:
    optimizer = {"learning_rate": 1e-3, "schedule": "linear", "warmup_steps": 0, "final_learning_rate_ratio": 0.5}
    job = group_job(corpora, tied=False, training={"steps": 2}, optimizer=optimizer)
    for step, factor in enumerate((1.0, 0.5)):
        found = {name: values for rank in world_pool.run(2, rates, job) for name, values in rank[step].items()}
        for name, (rate, decay) in {
            "transformer.wte.weight": (2e-4, 0.1),
            "transformer.h.1.mlp.c_fc.weight": (1e-2, 0.5),
            "transformer.h.1.mlp.c_fc.bias": (1e-2, 0.0),
            "transformer.h.0.attn.c_attn.weight": (1e-3, 0.0),
            "transformer.wpe.weight": (1e-3, 0.1),
        }.items():
            assert found[name] == (pytest.approx(rate * factor), decay), name


def losses(job: Job) -> list[float]:
    """Train from the newest checkpoint, where there is one; return the losses of the steps."""
    with Session(job, device=torch.device("cpu")) as session:
        session.restore()
        results = []
        for batches in session.batches():
            results.append(session.step(batches).loss)
            if session.steps_done == 2:
                session.save(wait=True)
        return results


@pytest.mark.slow
def test_groups_go_on_from_a_checkpoint_of_another_layout(world_pool: WorldPool, corpora: Path, tmp_path: Path) -> None:
    kept = {"resume": "auto", "directory": str(tmp_path / "kept")}
    whole = world_pool.run(2, losses, group_job(corpora, checkpoint=kept))[0]
    split = group_job(corpora, checkpoint=kept, parallel={"tensor_parallel_degree": 2})
    assert world_pool.run(2, losses, split)[0] == pytest.approx(whole[2:], rel=1e-9)
