"""The arithmetic of AdamW (arXiv 1711.05101) for optimizers that keep its moments in their own way.

Every product and sum is an operator of its own, so that each element is rounded alike wherever it stands in a tensor:
fused multiply-adds of a vectorized loop and of its remainder may differ in the last bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor


class AdamWStep(NamedTuple):
    """Numbers of one step.

    Attributes:
        correction1, correction2: what the moments are divided by for their start at zero.
    """

    rate: float
    decay: float
    beta1: float
    beta2: float
    eps: float
    correction1: float
    correction2: float

    @classmethod
    def of(cls, group: Mapping[str, Any], step: float) -> AdamWStep:
        """Return the numbers of a group's step, counted from 1."""
        beta1, beta2 = group["betas"]
        corrections = (1 - beta1**step, 1 - beta2**step)
        return cls(group["lr"], group["weight_decay"], beta1, beta2, group["eps"], *corrections)


def next_moments(at: AdamWStep, gradient: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return both moments after a gradient, as new tensors."""
    gradient = gradient.to(first.dtype)
    return (
        (first * at.beta1).add_(gradient * (1 - at.beta1)),
        (second * at.beta2).add_(gradient.square().mul_(1 - at.beta2)),
    )


def adamw_update(at: AdamWStep, weight: Tensor, first: Tensor, second: Tensor) -> None:
    """Move weights by the moments, which it uses up."""
    divisor = second.sqrt_().div_(at.correction2**0.5).add_(at.eps)
    weight.mul_(1 - at.rate * at.decay).sub_(first.mul_(at.rate / at.correction1).div_(divisor))
