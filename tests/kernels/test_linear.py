"""Linear layers whose weight gradients wait: nothing before they are asked for, the same gradients after."""

from __future__ import annotations

import copy
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from shardwise.kernels.linear import WeightGradient, WeightGradients, defer_weight_gradients


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, 13, bias=False), Conv1D(6, 13), nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.down(torch.tanh(self.up(x))))


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_come_when_they_are_asked_for(recompute: bool) -> None:
    torch.manual_seed(0)
    plain = nn.ModuleList(Block() for _ in range(2)).double()
    split = copy.deepcopy(plain)
    later = defer_weight_gradients(split)
    inputs = [torch.randn(3, 5, 6, dtype=torch.float64) for _ in range(2)]
    waiting = []
    for x in inputs:
        found = []
        for blocks in (plain, split):
            x = x.detach().requires_grad_()
            out = x
            for block in blocks:
                out = checkpoint(block, out, use_reentrant=False) if recompute else block(out)
            out.square().sum().backward()
            found.append(x.grad)
        torch.testing.assert_close(found[1], found[0])
        waiting.append(later.take())
    assert not later.pending
    for block in split:
        assert block.up.weight.grad is None and block.down.weight.grad is None and block.down.bias.grad is None
        assert block.norm.weight.grad is not None
    for run in waiting:
        run()
    for expected, given in zip(plain.parameters(), split.parameters(), strict=True):
        assert given.grad is not None and given.grad.grad_fn is None
        torch.testing.assert_close(given.grad, expected.grad)


def test_nothing_waits_without_backward() -> None:
    block = Block()
    later = defer_weight_gradients([block])
    with torch.no_grad():
        block(torch.randn(2, 6))
    assert not later.pending


def test_weight_gradients_that_do_not_wait_come_with_backward() -> None:
    block = Block()
    later = defer_weight_gradients([block])
    summed = []
    later.waits, later.sums = False, {block.up: lambda: summed.append(block.up.weight.grad)}
    block(torch.randn(2, 6)).sum().backward()
    assert not later.pending
    assert all(parameter.grad is not None for parameter in block.parameters())
    assert len(summed) == 1 and summed[0] is block.up.weight.grad


def test_what_a_weight_gradient_needs_goes_before_the_next_is_computed() -> None:
    later = WeightGradients()
    module, alive = nn.Linear(2, 2), list[bool]()
    needed = torch.ones(2)
    gone = weakref.ref(needed)
    later.leave(WeightGradient(module, partial(torch.sum, needed)))
    later.leave(WeightGradient(module, lambda: alive.append(gone() is not None)))
    del needed
    later.take()()
    assert alive == [False]


def test_what_the_next_weight_gradient_needs_is_fetched_meanwhile() -> None:
    later, module, order = WeightGradients(), nn.Linear(2, 2), list[str]()
    for name in "abc":
        compute, begin = (partial(order.append, f"{verb} {name}") for verb in ("compute", "begin"))
        later.leave(WeightGradient(module, compute, begin))
    later.take()()
    first = [order.index(said) for said in ("begin a", "begin b", "compute a", "begin c", "compute b", "compute c")]
    assert first == sorted(first)
