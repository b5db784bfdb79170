"""What a user's module draws by itself, and dropout in checkpoints of its own: the same numbers on every layout."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise.commands.verify import verify_rank
from shardwise.errors import LegalityError
from shardwise.testing.comparison import VerifyReport
from shardwise.testing.world import WorldPool
from shardwise.training.setup import set_up
from shardwise.training.step import train_step
from tests.habits.building import Residual, Stack
from tests.habits.table import CHECKPOINTS, LAYOUTS, ONE, REPLICAS, SHARDS, STAGES, ZERO_1
from tests.habits.trial import RATE, STEPS, make_job

EVERYWHERE = (SHARDS, REPLICAS, ZERO_1, STAGES, CHECKPOINTS)
HERE = "tests.parity.test_own_draws"


class NoisyResidual(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0.3 * torch.randn_like(x))


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.3 * torch.randn_like(x)


class Noisy(Stack):
    """Noise before blocks, in blocks, by a layer of its own and behind it."""

    block = NoisyResidual

    def __init__(self) -> None:
        super().__init__()
        self.noise = Noise()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.noise(x) + torch.rand_like(x))

    def read_out(self, x: Tensor) -> Tensor:
        return super().read_out(self.noise(x) * torch.rand(()))


class MixedUp(Stack):
    """Mixup: a share of Beta's distribution, by NumPy, and a permutation."""

    def forward(self, x: Tensor) -> Tensor:
        share = numpy.random.beta(0.4, 0.4)
        return super().forward(share * x + (1 - share) * x[torch.randperm(len(x))])


class Sampled(Stack):
    """The reparameterisation of a variational autoencoder."""

    def read_out(self, x: Tensor) -> Tensor:
        mean = super().read_out(x)
        return mean + torch.randn_like(mean) * self.first.bias.exp()


class LayerDropped(Stack):
    """Blocks that Python's dice leave out."""

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if random.random() < 0.7:
                x = block(x)
        return x


class CheckpointedNoise(Noisy):
    """The module checkpoints its noisy blocks."""

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class DroppingResidual(Residual):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.dropout(x))


class Dropping(Stack):
    block = DroppingResidual


class CheckpointedDropout(Dropping):
    """The module checkpoints blocks with dropout."""

    reentrant = False

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class ReentrantDropout(CheckpointedDropout):
    reentrant = True


class InnerCheckpoint(DroppingResidual):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return result


class CheckpointsInBlocks(Dropping):
    block = InnerCheckpoint


REFUSALS = {
    (MixedUp, STAGES): "NumPy's generator",
    (LayerDropped, STAGES): "NumPy's generator",
    (Sampled, STAGES): "draws random numbers, and its blocks are no chain",
    (ReentrantDropout, STAGES): "use_reentrant=False",
}


def trained(directory: str, module: str, layout: str) -> list[tuple[float, float]] | str:
    """Return losses and norms of a module's steps, from generators that differ between ranks."""
    rank = dist.get_rank()
    torch.manual_seed(rank), random.seed(rank), numpy.random.seed(rank)
    sections: dict[str, Any] = {**LAYOUTS[layout][1], "model": {"factory": f"{HERE}:{module}"}}
    sections["model"]["loss"] = "tests.habits.building:squared_error"
    try:
        run = set_up(make_job(directory, "RowsTogether", sections), torch.device("cpu"))
    except LegalityError as error:
        return str(error)
    numbers = []
    for step in range(STEPS):
        run.optimizer.set_learning_rate(RATE)
        batches = list(run.stream.batches(step))
        result = train_step(run.model, run.objective, batches, run.optimizer, run.scaler, step)
        numbers.append((result.loss, result.grad_norm))
    return numbers


def check(pool: WorldPool, directory: Path, module: type[Stack], layouts: tuple[str, ...]) -> None:
    alone = pool.run(1, trained, str(directory), module.__name__, ONE)[0]
    for layout in layouts:
        for came in pool.run(LAYOUTS[layout][0], trained, str(directory), module.__name__, layout):
            if (module, layout) in REFUSALS:
                assert REFUSALS[module, layout] in str(came), layout
            else:
                assert numpy.allclose(came, alone, rtol=1e-9, atol=0), layout


def verified(directory: str, module: str, layout: str) -> VerifyReport | None:
    """Return what verify says of a module; run on every rank."""
    sections: dict[str, Any] = {**LAYOUTS[layout][1], "model": {"factory": f"{HERE}:{module}"}}
    sections["model"]["loss"] = "tests.habits.building:squared_error"
    return verify_rank(make_job(directory, "RowsTogether", sections), torch.device("cpu"), 2)


@pytest.mark.parametrize(
    ("module", "layout"),
    [
        (Noisy, STAGES),
        *(pytest.param(module, SHARDS, marks=pytest.mark.slow) for module in (MixedUp, Sampled, LayerDropped)),
        pytest.param(CheckpointedNoise, REPLICAS, marks=pytest.mark.slow),
    ],
)
def test_verify_draws_alike(world_pool: WorldPool, corpora: Path, module: type[Stack], layout: str) -> None:
    report = world_pool.run(LAYOUTS[layout][0], verified, str(corpora), module.__name__, layout)[0]
    assert report is not None and report.agrees, report
    assert report.max_relative_error < 1e-9
    wide = [difference for difference in report.differences if difference.tolerance > 1e-6]
    assert not wide, wide


def test_noise_is_that_of_the_microbatch(world_pool: WorldPool, corpora: Path) -> None:
    check(world_pool, corpora, Noisy, (STAGES,))


@pytest.mark.slow
@pytest.mark.parametrize("module", [Noisy, MixedUp, Sampled, LayerDropped])
def test_draws_are_the_same_on_every_layout(world_pool: WorldPool, corpora: Path, module: type[Stack]) -> None:
    check(world_pool, corpora, module, EVERYWHERE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "plain"),
    [
        (CheckpointedNoise, Noisy),
        (CheckpointedDropout, Dropping),
        (ReentrantDropout, Dropping),
        (CheckpointsInBlocks, Dropping),
    ],
)
def test_recomputation_draws_again(
    world_pool: WorldPool, corpora: Path, module: type[Stack], plain: type[Stack]
) -> None:
    check(world_pool, corpora, module, EVERYWHERE)
    names = (plain.__name__, module.__name__)
    without, recomputed = (world_pool.run(1, trained, str(corpora), name, ONE)[0] for name in names)
    assert numpy.allclose(recomputed, without, rtol=1e-9, atol=0)
