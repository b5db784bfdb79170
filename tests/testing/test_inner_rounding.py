"""How far fp32 inside an fp64 model moves its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.testing.oracle_rounding import inner_rounding, loss_rounding
from shardwise.testing.reference import _moved

WEIGHT = torch.linspace(0.3, 1.7, 24, dtype=torch.float64).view(4, 6)
SINGLE = torch.linspace(-1.0, 1.0, 24).view(6, 4)


class OneStep:
    """An oracle of one weight."""

    def __init__(self, loss: Callable[[Tensor], Tensor]) -> None:
        self.loss, self.gradients = loss, dict[str, Tensor]()

    def backward(self, step: int) -> float:
        weight = WEIGHT.clone().requires_grad_()
        loss = self.loss(weight)
        loss.backward()
        assert weight.grad is not None
        self.gradients = {"weight": weight.grad}
        return float(loss.detach())


def measured(loss: Callable[[Tensor], Tensor]) -> float:
    oracle: Any = OneStep(loss)
    return inner_rounding(oracle, 0)


def test_fp64_alone_has_none() -> None:
    assert measured(lambda weight: (weight @ weight.T).softmax(-1).square().sum()) == 0


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(lambda weight: weight.float().softmax(-1).double().square().sum(), id="it can do without"),
        pytest.param(lambda weight: (weight.float() @ SINGLE).exp().double().sum(), id="it multiplies by fp32"),
    ],
)
def test_fp32_inside_is_measured(loss: Callable[[Tensor], Tensor]) -> None:
    assert 1e-9 < measured(loss) < 1e-5


def test_a_loss_that_nearly_cancels_is_rounded_further() -> None:
    def square_of(rest: float) -> float:
        return loss_rounding(lambda: float((torch.full((8,), 16.0).sum() - (128 - rest)).square()))

    assert 1e-3 < square_of(0.01) < 1e-2
    assert square_of(100.0) < 1e-6


def test_gradients_of_any_layout_are_moved_by_their_rounding() -> None:
    gradient = torch.ones(2, 3).t()  # of a parameter that lies transposed
    assert sorted(_moved(gradient, 0.5, 0.0).flatten().tolist()) == [0.5, 0.5, 0.5, 1.5, 1.5, 1.5]
