"""Checkpointing and offload: same gradients with dropout on, less memory, and the groups of SMP's strategies."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.errors import ModelError
from shardwise.job.schema import MemorySection
from shardwise.kernels.dropout import DropoutScope, dropout_scope, replace_dropout
from shardwise.observe.memory import LiveBytes
from shardwise.parallel.activation_offload import ActivationOffload
from shardwise.parallel.builder import group_blocks
from shardwise.parallel.transforms.checkpointing import apply_activation_checkpointing

WIDTH, ROWS, DEPTH = 16, 64, 6
CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH), nn.Dropout(0.2)
        self.runs = count(1)  # a recomputation leaves no trace in an attribute that could be copied

    def forward(self, hidden: Tensor, scale: Tensor | None = None) -> Tensor:
        next(self.runs)
        inner = torch.tanh(self.up(hidden)).exp().sin()
        return hidden + self.drop(self.down(inner)) * (1.0 if scale is None else scale)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.own_scale = False

    def forward(self, hidden: Tensor) -> Tensor:
        shared = torch.ones(())
        for number, block in enumerate(self.blocks):
            hidden = block(hidden, scale=torch.full((), 1.0 + number) if self.own_scale else shared)
        return hidden.square().sum()


def prepared(offload: ActivationOffload | None = None, **memory: Any) -> Net:
    torch.manual_seed(0)
    net = Net().double()
    replace_dropout(net)
    section = MemorySection(**memory)
    if section.activation_checkpointing != "none":
        groups = group_blocks(list(net.blocks), section.checkpoint_strategy)
        apply_activation_checkpointing(groups, section, offload)
    return net


def gradients(net: Net, microbatches: int = 2) -> tuple[list[Tensor], int]:
    """Gradients of two microbatches, and peak bytes."""
    inputs = torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with LiveBytes(net, inputs) as memory:
        for number in range(microbatches):
            with dropout_scope(DropoutScope(0, 0, torch.arange(ROWS) + number * ROWS)):
                loss = net(inputs)
            loss.backward()
            del loss
    return [parameter.grad for parameter in net.parameters() if parameter.grad is not None], memory.peak


MODES: list[dict[str, Any]] = [
    {"activation_checkpointing": "full"},
    {"activation_checkpointing": "selective"},
    {"activation_checkpointing": "full", "checkpoint_every": 2},
    {"activation_checkpointing": "full", "checkpoint_strategy": "contiguous"},
    {"activation_checkpointing": "full", "checkpoint_strategy": "group_4"},
    {"activation_checkpointing": "selective", "checkpoint_strategy": "group_2"},
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: "-".join(map(str, mode.values())))
def test_gradients_are_equal_with_dropout_on(mode: dict[str, Any], offloaded: bool) -> None:
    plain, most = gradients(prepared())
    ours, peak = gradients(prepared(ActivationOffload(CPU, 2) if offloaded else None, **mode))
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=0)
    if mode.get("checkpoint_strategy") != "contiguous":  # one checkpoint recomputes everything at once
        assert peak < most


def test_full_keeps_less_than_selective() -> None:
    peaks = [gradients(prepared(activation_checkpointing=mode))[1] for mode in ("none", "selective", "full")]
    assert peaks[0] > 1.2 * peaks[1] and peaks[1] > peaks[2]


def test_how_often_blocks_run() -> None:
    """Every n-th block, and whole groups, are computed again once."""
    for mode, again in (({"checkpoint_every": 4}, {0, 4}), ({"checkpoint_strategy": "group_4"}, set(range(DEPTH)))):
        net = prepared(activation_checkpointing="full", **mode)
        gradients(net, microbatches=1)
        assert [next(block.runs) - 1 for block in net.blocks] == [2 if n in again else 1 for n in range(DEPTH)]


@pytest.mark.parametrize(
    "strategy, sizes", [("each", [1] * 6), ("contiguous", [6]), ("group_2", [2, 2, 2]), ("group_4", [4, 2])]
)
def test_groups(strategy: str, sizes: list[int]) -> None:
    blocks = [nn.Identity() for _ in range(6)]
    groups = group_blocks(blocks, strategy)
    assert [len(group) for group in groups] == sizes and [b for group in groups for b in group] == blocks


def test_evaluation_is_not_checkpointed() -> None:
    net = prepared(activation_checkpointing="full", checkpoint_strategy="group_2").eval()
    with torch.no_grad():
        value = net(torch.ones(2, WIDTH, dtype=torch.float64))
    assert [next(block.runs) - 1 for block in net.blocks] == [1] * DEPTH
    with torch.no_grad():
        assert float(value) == float(prepared().eval()(torch.ones(2, WIDTH, dtype=torch.float64)))


def test_a_group_refuses_blocks_with_arguments_of_their_own() -> None:
    net = prepared(activation_checkpointing="full", checkpoint_strategy="group_2")
    net.own_scale = True
    with pytest.raises(ModelError, match="checkpoint_strategy: each"):
        gradients(net)


class Remembering(nn.Module):
    """A block that reads the states that the blocks before have left, counts its calls and keeps an average."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.calls = nn.Linear(WIDTH, WIDTH), 0
        self.norm = nn.BatchNorm1d(WIDTH, momentum=0.3)

    def forward(self, hidden: Tensor, states: list[Tensor]) -> Tensor:
        self.calls += 1
        inner = self.norm(hidden) + self.norm.running_mean
        hidden = hidden + self.calls * torch.tanh(self.up(inner + torch.stack(states).sum(0)))
        states.append(hidden)
        return hidden


class Writing(nn.Module):
    """A block that writes a tensor that it is given."""

    def forward(self, hidden: Tensor, total: Tensor) -> Tensor:
        return hidden * total.add_(1)


def remembered(strategy: str, microbatches: int = 2) -> list[Tensor]:
    """Return gradients, averages and calls after some microbatches."""
    torch.manual_seed(0)
    blocks = [Remembering().double() for _ in range(3)]
    if strategy:
        memory = MemorySection(activation_checkpointing="full", checkpoint_strategy=strategy)
        apply_activation_checkpointing(group_blocks(list(blocks), strategy), memory, None)
    for seed in range(microbatches):
        hidden = torch.randn(8, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        states = [hidden.requires_grad_()]
        for block in blocks:
            hidden = block(hidden, states)
        torch.stack(states).square().sum().backward()
    gradients = [parameter.grad for block in blocks for parameter in block.parameters() if parameter.grad is not None]
    return [
        *gradients,
        *(buffer for block in blocks for buffer in block.buffers()),
        torch.tensor([b.calls for b in blocks]),
    ]


@pytest.mark.parametrize("strategy", ["each", "group_2"])
def test_a_recomputation_finds_what_its_forward_has_found_and_leaves_no_trace(strategy: str) -> None:
    for value, expected in zip(remembered(strategy), remembered(""), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)


def test_a_block_that_writes_what_it_is_given_is_refused_by_name() -> None:
    block = Writing()
    apply_activation_checkpointing([[block]], MemorySection(activation_checkpointing="full"), None)
    with pytest.raises(ModelError, match=r"Writing \(.*:\d+\) writes a tensor"):
        block(torch.ones(2, requires_grad=True), torch.zeros(2))


def test_a_gradient_of_a_gradient_recomputes_blocks_again() -> None:
    found = []
    for mode in ("none", "full"):
        net = prepared(activation_checkpointing=mode)
        net.eval()
        hidden = torch.linspace(-1, 1, ROWS * WIDTH, dtype=torch.float64).view(ROWS, WIDTH).requires_grad_()
        loss = net(hidden)
        (slope,) = torch.autograd.grad(loss, hidden, create_graph=True)
        (loss + 0.1 * slope.square().sum()).backward()
        found.append([parameter.grad for parameter in net.parameters()])
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=0)
