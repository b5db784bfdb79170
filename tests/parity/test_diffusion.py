"""Denoisers of examples/diffusion.py on every layout against one process: its transformer, and a U-Net of diffusers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from examples.diffusion import Transformer
from shardwise.data.batch import Batch
from shardwise.errors import LegalityError
from shardwise.job.schema import Job
from shardwise.plan.plan import World, resolve
from shardwise.testing.world import WorldPool
from shardwise.training.setup import study
from tests.parity.jobs import check_agrees

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "shard 2": (2, {"sharded_data_parallel_degree": 2}),
    "shard 2, replica 2": (4, {"sharded_data_parallel_degree": 2}),
    "checkpointed": (2, {"memory": {"activation_checkpointing": "full"}}),
}
STAGES = {"pipeline_parallel_degree": 2}


class GivenNoise(Transformer):
    """The transformer alone: noise and times are the data's."""

    def forward(self, noisy: Tensor, time: Tensor) -> Tensor:
        return super().forward(noisy, time)


def noisy_images(count: int = 64) -> list[dict[str, Tensor]]:
    """Return samples with the noise that was added to each as its labels."""
    draw = torch.Generator().manual_seed(0)
    noise, times = torch.randn(count, 1, 8, 8, generator=draw), torch.randint(100, (count,), generator=draw)
    return [{"noisy": noise[n] + 1, "time": times[n], "labels": noise[n]} for n in range(count)]


def squares_of_labels(output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the squared distance to the noise."""
    assert batch.labels is not None
    return ((output - batch.labels).square().mean((1, 2, 3)) * batch.counted).sum(), batch.counted.sum()


def diffusion_job(model: dict[str, Any], data: str, parallel: dict[str, Any]) -> Job:
    """Return a job of two steps; its microbatches are whole in validation too, as draws depend on their rows."""
    parallel = dict(parallel)
    return Job.model_validate(
        {
            "model": model,
            "memory": parallel.pop("memory", {}),
            "data": {"factory": data, "factory_arguments": {"count": 64}, "validation_fraction": 0.25},
            "training": {"steps": 2, "sequences_per_step": 8, "microbatch_size": 2},
            "precision": {"compute": "fp64"},
            "parallel": {"device": "cpu", **parallel},
        }
    )


def drawing(parallel: dict[str, Any], of_diffusers: bool = False) -> Job:
    model = {"factory": "examples.diffusion:model", "loss": "examples.diffusion:squares"}
    return diffusion_job(
        {**model, "factory_arguments": {"of_diffusers": of_diffusers}}, "examples.diffusion:images", parallel
    )


@pytest.mark.slow
@pytest.mark.parametrize("of_diffusers", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_verify_agrees(world_pool: WorldPool, layout: str, of_diffusers: bool) -> None:
    ranks, parallel = LAYOUTS[layout]
    check_agrees(world_pool, ranks, drawing(parallel, of_diffusers))


@pytest.mark.slow
def test_stages_take_noise_of_the_data(world_pool: WorldPool) -> None:
    model = {"factory": f"{__name__}:GivenNoise", "loss": f"{__name__}:squares_of_labels"}
    check_agrees(world_pool, 2, diffusion_job(model, f"{__name__}:noisy_images", STAGES))


def test_stages_refuse_draws_in_forward() -> None:
    job = drawing(STAGES)
    with pytest.raises(LegalityError, match="draws random numbers, and its blocks are no chain"):
        resolve(job, World(2, "cpu", 2), study(job))
