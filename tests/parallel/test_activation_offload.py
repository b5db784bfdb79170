"""Activation offload: what goes to the host comes back, ahead of its use, from buffers that are used again."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from shardwise.job.schema import MemorySection
from shardwise.parallel.activation_offload import ActivationOffload, HostPool
from shardwise.parallel.transforms.checkpointing import apply_activation_checkpointing

CPU = torch.device("cpu")


def test_pool_hands_the_same_buffer_out_again() -> None:
    pool = HostPool(pinned=False)
    first = pool.take(torch.ones(3, 4))
    pool.give_back(first)
    assert pool.take(torch.zeros(3, 4)) is first
    assert pool.take(torch.zeros(3, 4)) is not first
    other = pool.take(torch.zeros(3, 4, dtype=torch.float64))
    assert other.dtype == torch.float64 and pool.take(torch.zeros(4, 3)).shape == (4, 3)


def saved(offload: ActivationOffload, count: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    inputs = [torch.full((5,), float(n), requires_grad=True) for n in range(count)]
    outputs = []
    for value in inputs:
        with offload.checkpoint_input():
            outputs.append(value * value)
    return inputs, outputs


@pytest.mark.parametrize("horizon", [1, 3, 10])
def test_values_come_back_in_any_order(horizon: int) -> None:
    for order in ([4, 3, 2, 1, 0], [0, 1, 2, 3, 4], [2, 0, 4, 1, 3]):
        offload = ActivationOffload(CPU, horizon)
        inputs, outputs = saved(offload, 5)
        for number in order:
            outputs[number].sum().backward()
            assert torch.equal(inputs[number].grad, torch.full((5,), 2.0 * number))
        assert not offload._order


@pytest.mark.parametrize("horizon", [1, 2, 3])
def test_backward_loads_no_more_than_the_horizon_ahead(horizon: int) -> None:
    offload = ActivationOffload(CPU, horizon)
    _, outputs = saved(offload, 6)
    per_output = len(offload._order) // 6
    outputs[5].sum().backward()
    on_the_way = [one.loaded is not None for one in offload._order]
    ahead = [n for n, flag in enumerate(on_the_way) if flag]
    assert ahead == list(range(len(on_the_way)))[-len(ahead) :] and 0 < len(ahead) <= horizon
    assert len(on_the_way) == 5 * per_output


def test_buffers_are_used_again_in_the_next_step() -> None:
    offload = ActivationOffload(CPU, 2)
    for _ in range(3):
        _, outputs = saved(offload, 4)
        for output in reversed(outputs):
            output.sum().backward()
    made = sum(len(buffers) for buffers in offload.pool._free.values())
    assert made <= 2 * 4  # as many as one step saves


def test_integers_and_empty_tensors_stay() -> None:
    offload = ActivationOffload(CPU, 2)
    for value in (torch.arange(3), torch.empty(0, 3)):
        assert offload._pack(value) is value and offload._unpack(value) is value


def test_a_gradient_of_a_gradient_finds_the_values_again() -> None:
    offload = ActivationOffload(CPU, 1)
    (value,), (output,) = saved(offload, 1)
    (slope,) = torch.autograd.grad(output.sum(), value, create_graph=True)
    (output.sum() + slope.square().sum()).backward()
    assert torch.equal(value.grad, 2 * value + 8 * value)


class _Square(nn.Module):
    """A block that notes, weakly, what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.given: list[weakref.ref[torch.Tensor]] = []

    def forward(self, hidden: torch.Tensor, *, scale: float) -> torch.Tensor:
        self.given.append(weakref.ref(hidden))
        return hidden * hidden * self.weight * scale


@pytest.mark.parametrize("by_name", [False, True])
def test_the_inputs_of_checkpoints_leave_the_device(by_name: bool) -> None:
    """Nothing but the host's copies holds them between forward and backward, whatever a checkpoint remembers."""
    blocks = [_Square() for _ in range(4)]
    memory = MemorySection(activation_checkpointing="full", offload_activations=True)
    apply_activation_checkpointing([[block] for block in blocks], memory, ActivationOffload(CPU, 1))
    hidden = torch.full((4,), 0.9, dtype=torch.float64)
    for block in blocks:
        hidden = block(hidden=hidden, scale=1.1) if by_name else block(hidden, scale=1.1)
    assert [block.given[0]() for block in blocks] == [None] * 4
    hidden.sum().backward()
    plain = [nn.Parameter(torch.ones(4, dtype=torch.float64)) for _ in blocks]
    expected = torch.full((4,), 0.9, dtype=torch.float64)
    for weight in plain:
        expected = expected * expected * weight * 1.1
    expected.sum().backward()
    for block, weight in zip(blocks, plain, strict=True):
        assert block.weight.grad is not None and weight.grad is not None
        assert torch.equal(block.weight.grad, weight.grad)
