"""Models whose forward changes buffers: running statistics over stages, beside one process; the scaler of `smp.amp`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise.smp as smp
from shardwise.testing.world import WorldPool

ROWS, SIZE, STEPS, MICROBATCHES = 8, 6, 4, 2
STAGES = {"pipeline_parallel_degree": 2, "microbatches": MICROBATCHES, "ddp": True}
CONTENT = "checkpoints"


class Block(nn.Module):
    """Two convolutions with their norms, around which the input goes."""

    def __init__(self, width: int, norm: type[nn.Module]) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = norm(width, track_running_stats=True)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm(self.convolution(x)))


class Pictures(nn.Module):
    """A narrow residual network whose norms have weights, none, or statistics of each picture."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, affine=False))
        self.blocks = nn.ModuleList(Block(4, kind) for kind in (nn.BatchNorm2d, nn.InstanceNorm2d, nn.BatchNorm2d))
        self.last = nn.BatchNorm1d(4, affine=False, momentum=0.3)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(self.last(x.mean((2, 3))))
        return found


@smp.step
def train_step(model: Any, scaler: Any, x: Tensor, label: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), label)
    model.backward(scaler.scale(loss))
    return loss


@smp.step
def evaluation_step(model: Any, x: Tensor, label: Tensor) -> Tensor:
    return F.cross_entropy(model(x), label)


def made() -> Pictures:
    torch.manual_seed(2)
    return Pictures().double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    """[8, 1, 6, 6] pictures and [8] labels; in the second step one is infinite."""
    drawn = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, 1, SIZE, SIZE, dtype=torch.float64, generator=drawn)
    if step == 1:
        x[0, 0, 0, 0] = torch.inf
    return x, torch.randint(0, 3, (ROWS,), generator=drawn)


def plain() -> tuple[list[float], float, dict[str, Tensor]]:
    """Losses, the loss in evaluation, and weights of torch alone, in microbatches."""
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(2, 2 + STEPS):
        optimizer.zero_grad()
        parts = zip(*(value.chunk(MICROBATCHES) for value in batch(step)), strict=True)
        found = [F.cross_entropy(model(x), label) for x, label in parts]
        torch.stack(found).mean().backward()
        optimizer.step()
        losses.append(float(torch.stack(found).detach().mean()))
    model.eval()
    x, label = batch(9)
    return losses, float(F.cross_entropy(model(x), label).detach()), model.state_dict()


def trained(config: dict[str, Any], where: Path | None = None) -> tuple[list[float], float, dict[str, Tensor]]:
    """The same by a script; saved in parts after half of the steps, spoiled and resumed, where there is a `where`."""
    smp.init(config)
    try:
        model: Any = smp.DistributedModel(made())
        optimizer: Any = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        scaler, losses = smp.amp.GradScaler(init_scale=4.0), []
        for step in range(2, 2 + STEPS):
            optimizer.zero_grad()
            losses.append(float(train_step(model, scaler, *batch(step)).reduce_mean()))
            scaler.step(optimizer)
            scaler.update()
            if where is not None and step == 3:
                smp.save_checkpoint(str(where), tag="a", partial=True, model=model, optimizer=optimizer)
                train_step(model, scaler, *batch(8))
                smp.resume_from_checkpoint(str(where), tag="a", partial=True)
        model.eval()
        with torch.no_grad():
            loss = evaluation_step(model, *batch(9)).reduce_mean()
        return losses, float(loss), model.state_dict()
    finally:
        smp.state.reset()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "ranks, config",
    [
        (1, {"ddp": True, "microbatches": MICROBATCHES}),
        (2, STAGES),
        (2, {**STAGES, "pipeline": "simple"}),
        pytest.param(3, {**STAGES, "pipeline_parallel_degree": 3}, marks=pytest.mark.slow),
    ],
)
def test_statistics_are_those_of_one_process(world_pool: WorldPool, ranks: int, config: dict[str, Any]) -> None:
    """Losses, an evaluation that goes by them, and every buffer on every rank, counts of batches too."""
    losses, evaluated, weights = plain()
    for found in world_pool.run(ranks, trained, config):
        assert found[0] == pytest.approx(losses, rel=1e-12)
        assert found[1] == pytest.approx(evaluated, rel=1e-12)
        assert found[2].keys() == weights.keys()
        for name, value in weights.items():
            torch.testing.assert_close(found[2][name], value, rtol=1e-11, atol=1e-12)


@pytest.mark.slow
def test_a_resumed_model_has_the_statistics_it_was_saved_with(world_pool: WorldPool, tmp_path: Path) -> None:
    losses, evaluated, weights = plain()
    for found in world_pool.run(2, trained, STAGES, tmp_path / CONTENT):
        assert found[0] == pytest.approx(losses, rel=1e-12)
        assert found[1] == pytest.approx(evaluated, rel=1e-12)
        assert torch.equal(found[2]["last.num_batches_tracked"], weights["last.num_batches_tracked"])


def of_replicas(broadcasts: bool) -> list[Tensor]:
    """A running mean on each of the data ranks, after a step on other pictures each."""
    smp.init({"ddp": True})
    try:
        model: Any = smp.DistributedModel(made(), broadcast_buffers=broadcasts)
        train_step(model, smp.amp.GradScaler(enabled=False), *batch(2 + smp.rank()))
        found: list[Tensor] = smp.allgather(model.get_module().last.running_mean, smp.DP_GROUP)
        return found
    finally:
        smp.state.reset()


@pytest.mark.parametrize("broadcasts", [True, False])
def test_replicas_have_the_first_ones_statistics(world_pool: WorldPool, broadcasts: bool) -> None:
    first, second = world_pool.run(2, of_replicas, broadcasts)[0]
    assert torch.equal(first, second) == broadcasts
    model = made()
    model(batch(2)[0])
    torch.testing.assert_close(first, model.last.running_mean)


def overflowing(config: dict[str, Any]) -> tuple[float, bool]:
    """The scale after a step whose gradients are infinite, and whether weights stayed as they were."""
    smp.init(config)
    try:
        model: Any = smp.DistributedModel(made())
        optimizer: Any = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        scaler = smp.amp.GradScaler(init_scale=4.0)
        train_step(model, scaler, *batch(1))
        scaler.step(optimizer)
        scaler.update()
        now = dict(model.local_named_parameters())
        return scaler.get_scale(), all(torch.equal(now[name], value) for name, value in made().named_parameters()
                                       if name in now)  # fmt: skip
    finally:
        smp.state.reset()


def test_the_scaler_skips_on_all_stages(world_pool: WorldPool) -> None:
    """Only the last one scales the loss; all unscale, and agree on what is infinite."""
    assert world_pool.run(2, overflowing, STAGES) == [(2.0, True)] * 2
