"""NaN in a router whose experts ranks share: every rank skips the step and counts it, and the next one trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.job.schema import Job
from shardwise.testing.world import WorldPool
from shardwise.training.session import Session
from shardwise.training.setup import AssembledJob, set_up
from tests.parity.test_experts import FP64, experts_job
from tests.parity.test_routers import records_routers

EXPERT: dict[str, Any] = {"expert_parallel_degree": 2}
ROUTER = {"balancing_loss": "layer", "balancing_coefficient": 0.5, "z_loss": 0.1, "bias_update_rate": 0.1}


def state_of(run: AssembledJob) -> dict[str, Tensor]:
    """Return copies of this rank's parameters and of its routers' biases."""
    values = {entry.name: entry.local.detach().clone() for entry in run.model.tensor_map}
    for part in run.model.parts:
        values |= {name: value.clone() for name, value in part.module.named_buffers() if name.endswith("bias")}
    return values


def nan_in_second_step(job: Job) -> tuple[list[bool], int, bool, bool]:
    """Train three steps, of which the last rank has NaN in its part of a router in the second.

    Returns:
        Which were skipped and how many, whether the second changed nothing, and whether the third has moved biases.
    """
    run = set_up(job, torch.device("cpu"))
    session = Session.of(run)
    routers = [entry for entry in run.model.tensor_map if entry.name.endswith("mlp.gate.weight")]
    skipped = [session.step(run.stream.batches(0)).skipped]
    before = state_of(run)
    if dist.get_rank() == dist.get_world_size() - 1:
        routers[-1].local.fill_(float("nan"))
    skipped.append(session.step(run.stream.batches(1)).skipped)
    routers[-1].local.copy_(before[routers[-1].name])
    behind = state_of(run)
    skipped.append(session.step(run.stream.batches(2)).skipped)
    is_unchanged = all(torch.equal(behind[name], value) for name, value in before.items())
    after = state_of(run)
    biases = [name for name in after if name.endswith("e_score_correction_bias")]
    has_moved = all(after[name].isfinite().all() and not torch.equal(after[name], before[name]) for name in biases)
    return skipped, session.progress.skipped, is_unchanged, bool(biases) and has_moved


SLOW = [
    (4, EXPERT),
    (4, {"expert_parallel_degree": 4}),
    (4, {**EXPERT, "tensor_parallel_degree": 2}),
    (4, {**EXPERT, "pipeline_parallel_degree": 2}),
    (4, {**EXPERT, "context_parallel_degree": 2}),
]


@pytest.mark.parametrize(
    "ranks, parallel", [(2, EXPERT), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_every_rank_skips_the_step_and_counts_it(
    world_pool: WorldPool, corpora: Path, ranks: int, parallel: dict[str, Any]
) -> None:
    if not records_routers("glm4_moe"):
        pytest.skip("this version of transformers records no router of glm4_moe: refused by name")
    config = {"experts_implementation": "eager"}
    job = experts_job(corpora, "glm4_moe", **FP64, router=ROUTER, parallel=parallel, config=config)
    assert world_pool.run(ranks, nan_in_second_step, job) == [([False, True, False], 1, True, True)] * ranks
