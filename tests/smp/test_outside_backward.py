"""Scripts that call `loss.backward()` themselves, outside of a step: as `model.backward` does, on every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise.smp as smp
from shardwise.testing.world import WorldPool
from tests.smp.scripts import batches, make_model

LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (2, {"ddp": True}),
    (2, {"ddp": True, "tensor_parallel_degree": 2}),
    (2, {"ddp": True, "tensor_parallel_degree": 2, "prescaled_batch": True}),
    (2, {"ddp": True, "sharded_data_parallel_degree": 2, "sdp_gradient_clipping": 100.0}),
    (2, {"ddp": True, "shard_optimizer_state": True}),
    (4, {"ddp": True, "tensor_parallel_degree": 2}),
]


def a_step(model: Any, optimizer: Any, ids: Tensor, own: bool, passes: int) -> float:
    """One optimizer step over `passes` backwards; the loss hangs on the logits in two ways."""
    optimizer.zero_grad()
    whole = 0.0
    for part in ids.chunk(passes):
        output = model(input_ids=part, labels=part)
        loss = (output.loss + output.logits.square().mean()) / passes
        loss.backward() if own else model.backward(loss)
        whole += float(loss.detach())
    optimizer.step()
    return whole


def plain(passes: int) -> tuple[list[float], dict[str, Tensor]]:
    model = make_model("gpt2")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return [a_step(model, optimizer, ids, True, passes) for ids in batches()], model.state_dict()


def trained(config: dict[str, Any], own: bool, passes: int) -> tuple[list[float], dict[str, Tensor]]:
    smp.init(config)
    try:
        model: Any = smp.DistributedModel(make_model("gpt2"))
        optimizer: Any = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        ranks, rank = (
            (smp.rdp_size(), smp.rdp_rank()) if config.get("prescaled_batch") else (smp.dp_size(), smp.dp_rank())
        )
        losses = []
        for ids in batches():
            loss = a_step(model, optimizer, ids.chunk(ranks)[rank], own, passes)
            losses.append(sum(smp.allgather(loss, smp.DP_GROUP)) / smp.dp_size())
        return losses, {name: value.clone() for name, value in model.state_dict().items()}
    finally:
        smp.state.reset()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("passes", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(("ranks", "config"), LAYOUTS)
def test_a_script_may_run_backward_itself(
    world_pool: WorldPool, ranks: int, config: dict[str, Any], passes: int
) -> None:
    losses, weights = plain(passes)
    for found, whole in world_pool.run(ranks, trained, config, True, passes):
        assert found == pytest.approx(losses, rel=1e-6)  # transformers takes the loss in fp32
        for name, value in whole.items():
            torch.testing.assert_close(value, weights[name], rtol=1e-5, atol=1e-8)


def masks(config: dict[str, Any]) -> list[float]:
    smp.init(config)
    try:
        torch.manual_seed(0)
        model: Any = smp.DistributedModel(nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 1, bias=False)).double())
        return [float(model(input=torch.ones(1, 64, dtype=torch.float64)).sum()) for _ in range(2)]
    finally:
        smp.state.reset()


def test_two_forwards_drop_differently() -> None:
    first, second = masks({})
    assert first != second
