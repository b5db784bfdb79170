"""LAMB and NovoGrad against their papers' formulas, written out for one step and several."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise.smp as smp
from shardwise.errors import ModelError
from shardwise.smp.optimizers import FusedLAMB, FusedLamb, FusedNovoGrad
from shardwise.testing.world import WorldPool
from tests.smp.scripts import batches, make_model

RATE, DECAY, BETAS = 0.05, 0.1, (0.9, 0.99)


def _run(optimizer: Any, parameter: nn.Parameter, gradients: Tensor) -> Tensor:
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


def _start() -> tuple[nn.Parameter, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    return nn.Parameter(start.clone()), start, torch.randn(3, 3, 4, generator=generator, dtype=torch.float64)


def test_lamb_is_the_papers() -> None:
    parameter, x, gradients = _start()
    optimizer = FusedLAMB([parameter], RATE, betas=BETAS, eps=1e-6, weight_decay=DECAY)
    found = _run(optimizer, parameter, gradients)
    assert optimizer.param_groups[0]["step"] == 3  # where schedules of apex's users look for it
    m, v = torch.zeros_like(x), torch.zeros_like(x)
    for step, g in enumerate(gradients, 1):
        g = g * min(1.0, 1.0 / float(g.norm()))
        m, v = BETAS[0] * m + (1 - BETAS[0]) * g, BETAS[1] * v + (1 - BETAS[1]) * g * g
        r = m / (1 - BETAS[0] ** step) / ((v / (1 - BETAS[1] ** step)).sqrt() + 1e-6) + DECAY * x
        x = x - RATE * x.norm() / r.norm() * r
    torch.testing.assert_close(found, x, rtol=1e-5, atol=1e-6)
    assert FusedLamb is FusedLAMB


def test_novograd_is_the_papers() -> None:
    parameter, x, gradients = _start()
    optimizer = FusedNovoGrad([parameter], RATE, False, BETAS, weight_decay=DECAY, grad_averaging=False)
    found = _run(optimizer, parameter, gradients)
    m, v = torch.zeros_like(x), gradients[0].norm() ** 2
    for g in gradients:
        v = BETAS[1] * v + (1 - BETAS[1]) * g.norm() ** 2
        m = BETAS[0] * m + g / (v.sqrt() + 1e-8)
        x = x - RATE * (m + DECAY * x)
    torch.testing.assert_close(found, x)
    for kind in (FusedLAMB, FusedNovoGrad):
        with pytest.raises(ModelError, match="amsgrad"):
            kind([parameter], amsgrad=True)


def _losses(config: dict[str, Any], kind: str) -> list[float]:
    smp.init(config)
    try:
        model = smp.DistributedModel(make_model("gpt2"))
        optimizer = smp.DistributedOptimizer(getattr(smp.optimizers, kind)(model.parameters(), lr=0.02))

        @smp.step
        def step(model: Any, ids: Tensor) -> Tensor:
            loss: Tensor = model(input_ids=ids, labels=ids)["loss"]
            model.backward(loss)
            return loss

        losses = []
        for ids in batches():
            optimizer.zero_grad()
            losses.append(float(step(model, ids).reduce_mean()))
            optimizer.step()
        return losses
    except ModelError as error:
        assert "not known to be elementwise" in str(error)
        return []
    finally:
        smp.state.reset()


@pytest.mark.parametrize("kind", ["FusedLAMB", pytest.param("FusedNovoGrad", marks=pytest.mark.slow)])
def test_stages_train_as_one_process_and_shards_are_refused(world_pool: WorldPool, kind: str) -> None:
    alone = _losses({"microbatches": 2}, kind)
    staged = world_pool.run(2, _losses, {"pipeline_parallel_degree": 2, "microbatches": 2}, kind)
    assert len(alone) == 3 and alone[-1] < alone[0]
    assert staged[0] == pytest.approx(alone, rel=1e-9)
    assert world_pool.run(2, _losses, {"sharded_data_parallel_degree": 2}, kind) == [[], []]
