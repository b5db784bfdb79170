"""Evaluations between a script's backward, its update and what it loads: nobody computes with former weights."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise.smp as smp
from shardwise.testing.world import WorldPool
from tests.smp.scripts import LEARNING_RATE, batches, make_model, train_step

SHARDED = {"ddp": True, "sharded_data_parallel_degree": 2, "sdp_gradient_clipping": 1.0}
LAYOUTS: dict[str, dict[str, Any]] = {
    "sharded": SHARDED,
    "state sharded": {"ddp": True, "shard_optimizer_state": True},
    "stages": {"ddp": True, "pipeline_parallel_degree": 2, "microbatches": 2},
}


class Own:
    """An optimizer of a script's own around torch's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()


@smp.step
def evaluation_step(model: Any, ids: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=ids, labels=ids)["loss"]
    return loss


def evaluated(model: Any, ids: Tensor) -> float:
    """The loss over this rank's rows."""
    model.eval()
    with torch.no_grad():
        loss = float(evaluation_step(model, ids).reduce_mean())
    model.train()
    return loss


def script(config: dict[str, Any], own: bool) -> tuple[list[float], list[float]]:
    """Losses after an update and after loading, each with an evaluation right before: ours, and plain torch's."""
    os.environ.pop("SM_HP_MP_PARAMETERS", None)
    module = make_model("gpt2")
    plain, other = copy.deepcopy(module), copy.deepcopy(module)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    smp.init(config)
    try:
        model: Any = smp.DistributedModel(module)
        inner: Any = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        optimizer = smp.DistributedOptimizer(Own(inner) if own else inner)
        mine = [batch.chunk(smp.dp_size())[smp.dp_rank()] for batch in batches()]
        train_step(model, mine[0])
        evaluated(model, mine[1])
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
        optimizer.step()
        found = [evaluated(model, mine[2])]
        model.load_state_dict(other.state_dict())
        found.append(evaluated(model, mine[2]))
        return found, reference(plain, other, mine[2], bool(config.get("sdp_gradient_clipping")))
    finally:
        smp.state.reset()


def reference(plain: nn.Module, other: nn.Module, mine: Tensor, clip: bool) -> list[float]:
    first = batches()[0]
    (0.5 * plain(input_ids=first, labels=first).loss).backward()
    if clip:
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    torch.optim.SGD(plain.parameters(), lr=LEARNING_RATE).step()
    with torch.no_grad():
        return [float(model(input_ids=mine, labels=mine).loss) for model in (plain, other)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout, own", [*((name, False) for name in LAYOUTS), ("state sharded", True)])
def test_an_evaluation_before_an_update_and_before_loading(world_pool: WorldPool, layout: str, own: bool) -> None:
    for found, expected in world_pool.run(2, script, LAYOUTS[layout], own):
        assert found == pytest.approx(expected, rel=1e-6)
