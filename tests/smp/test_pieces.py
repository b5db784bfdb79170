"""Stages of scripts' models that have no list of blocks, or are no chain of them, against plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import XLNetConfig, XLNetLMHeadModel

import shardwise.smp as smp
from shardwise.testing.world import WorldPool
from tests.smp.scripts import LENGTH, VOCABULARY, batches

LEARNING_RATE = 0.05


class First(nn.Module):
    """Images to features."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(1, 3, 3), nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.flatten(self.two(self.one(x).relu()).relu(), 1)


class Second(nn.Module):
    """Features to classes."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(64, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return torch.log_softmax(self.two(self.one(x).relu()) * scale, 1)


class Parts(nn.Module):
    """Two parts that are unlike each other; `scale` is no tensor, and counts all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = First(), Second()

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.second(self.first(x), scale)


def _model(kind: str) -> nn.Module:
    torch.manual_seed(5)
    if kind == "parts":
        return Parts().double()
    sizes: dict[str, Any] = {"d_model": 24, "n_layer": 2, "n_head": 4, "d_inner": 13, "vocab_size": VOCABULARY}
    return XLNetLMHeadModel(XLNetConfig(**sizes, dropout=0.0, attn_implementation="eager")).double()


def _batches(kind: str) -> list[tuple[Tensor, Tensor]]:
    if kind != "parts":
        return [(ids, ids) for ids in batches()]
    generator = torch.Generator().manual_seed(1)
    images = [torch.randn(8, 1, 8, 8, generator=generator, dtype=torch.float64) for _ in range(3)]
    return [(image, torch.arange(8) % 5) for image in images]


def _loss(model: Any, kind: str, x: Tensor, y: Tensor) -> Tensor:
    if kind == "parts":
        return nn.functional.nll_loss(model(x, scale=2.0), y)
    loss: Tensor = model(input_ids=x, labels=y)["loss"]
    return loss


def _plain(kind: str) -> tuple[list[float], dict[str, Tensor]]:
    model = _model(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for x, y in _batches(kind):
        optimizer.zero_grad()
        loss = torch.stack([_loss(model, kind, *both) for both in zip(x.chunk(4), y.chunk(4))]).mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, model.state_dict()


def _staged(kind: str, config: dict[str, Any]) -> tuple[float, float, list[int], int]:
    """Largest errors of losses and weights, answers counted by microbatch, and how many parameters are here."""
    smp.init(config)
    try:
        plain = _model(kind)
        optimizer = torch.optim.SGD(plain.parameters(), lr=LEARNING_RATE)  # before the model is wrapped
        model: Any = smp.DistributedModel(plain)
        optimizer = smp.DistributedOptimizer(optimizer)
        for part in model.get_module().children() if kind == "parts" else ():
            smp.set_activation_checkpointing(part)

        @smp.step
        def train(model: Any, x: Tensor, y: Tensor) -> Tensor:
            loss = _loss(model, kind, x, y)
            model.backward(loss)
            return loss

        @smp.step
        def count(model: Any, x: Tensor) -> int:
            found = model(x, scale=2.0) if kind == "parts" else model(input_ids=x)["logits"]
            return int((found.argmax(-1) >= 0).sum().item())

        losses = []
        for x, y in _batches(kind):
            optimizer.zero_grad()
            mine = [part.chunk(smp.dp_size())[smp.dp_rank()] for part in (x, y)]
            losses.append(sum(smp.allgather(float(train(model, *mine).reduce_mean()), smp.DP_GROUP)) / smp.dp_size())
            optimizer.step()
        with torch.no_grad():
            counts = count(model.eval(), _batches(kind)[0][0])
        expected, weights = _plain(kind)
        found = model.state_dict() if smp.rdp_rank() == 0 else None  # as scripts ask, on some ranks alone
        far = max((float((found[name] - weights[name]).abs().max()) for name in weights), default=0.0) if found else 0.0
        here = len(list(model.local_parameters()))
        return max(abs(a - b) for a, b in zip(losses, expected)), far, list(counts), here
    finally:
        smp.state.reset()


TWO: dict[str, Any] = {"partitions": 2, "microbatches": 4, "ddp": True}
CASES = [
    ("parts", 2, TWO),
    ("parts", 4, {**TWO, "microbatches": 2, "pipeline": "simple"}),
    ("parts", 4, {**TWO, "partitions": 4}),
    pytest.param("parts", 4, {**TWO, "microbatches": 2, "shard_optimizer_state": True}, marks=pytest.mark.slow),
    pytest.param("xlnet", 2, TWO, marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize("kind, ranks, config", CASES)
def test_stages_cut_from_the_forward_give_the_same_numbers(
    world_pool: WorldPool, kind: str, ranks: int, config: dict[str, Any]
) -> None:
    everything = len(list(_model(kind).parameters()))
    answers = 8 * (1 if kind == "parts" else LENGTH)
    for losses, weights, counts, here in world_pool.run(ranks, _staged, kind, config):
        assert losses <= 1e-6 and weights <= 1e-8
        assert len(counts) == config["microbatches"] and sum(counts) == answers
        assert 0 < here < everything
