"""Parity of a user's own module: buffers, functional dropout, a tie, uneven rows and its own loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.testing.world import WorldPool
from tests.habits.building import WIDTH, Stack
from tests.parity.jobs import make_module_job, verify_one


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "ranks, sections",
    [
        (1, {}),
        (4, {"parallel": {"sharded_data_parallel_degree": 2}, "training": {"sequences_per_step": 11}}),
        pytest.param(8, {"memory": {"activation_checkpointing": "full"}}, marks=pytest.mark.slow),
        (2, {"precision": {"compute": "bf16"}}),
        (2, {"parallel": {"pipeline_parallel_degree": 2}, "training": {"sequences_per_step": 7, "microbatch_size": 2}}),
        pytest.param(
            *(4, {"parallel": {"pipeline_parallel_degree": 2, "pipeline": "simple"}, "precision": {"compute": "bf16"}}),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_users_module_agrees(world_pool: WorldPool, corpora: Path, ranks: int, sections: dict[str, Any]) -> None:
    report = world_pool.run(ranks, verify_one, make_module_job(corpora, **sections))[0]
    assert report.agrees, (report.first, report.diagnosis)


class Cancelling(Stack):
    """A bias at zero, whose gradient is what is left of sums that cancel."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def read_out(self, x: Tensor) -> Tensor:
        return super().read_out(x + 4 * self.bias - (4 - 1e-11) * self.bias)


def test_rounding_of_a_cancelled_gradient_is_no_mistake(world_pool: WorldPool, corpora: Path) -> None:
    model = {"factory": "tests.parity.test_modules:Cancelling", "loss": "tests.habits.building:squared_error"}
    data = {"factory": "tests.habits.building:Rows"}
    job = make_module_job(corpora, model=model, data=data, parallel={"sharded_data_parallel_degree": 2})
    report = world_pool.run(2, verify_one, job)[0]
    assert report.agrees, (report.first, report.diagnosis)
