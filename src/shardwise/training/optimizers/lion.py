"""Lion: the sign of an interpolated momentum (arXiv 2302.06675, algorithm 2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from shardwise.training.optimizers.checks import check_betas, check_rates
from shardwise.training.optimizers.slice_optimizer import SliceOptimizer, chunks_of


class Lion(SliceOptimizer):
    """Moves each element by the learning rate against the sign of its momentum; weight decay apart from it."""

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        check_rates(lr, weight_decay)
        super().__init__(params, {"lr": lr, "betas": check_betas(betas), "weight_decay": weight_decay})

    def update(self, group: Mapping[str, Any], parameter: nn.Parameter) -> None:
        """Update one parameter and its momentum."""
        assert parameter.grad is not None
        state = self.state_of(parameter)
        state["step"] += 1
        rate, decay, (beta1, beta2) = group["lr"], group["weight_decay"], group["betas"]
        for weight, gradient, momentum in chunks_of([parameter, parameter.grad, state["exp_avg"]]):
            direction = (momentum * beta1).add_(gradient * (1 - beta1)).sign_()
            weight.mul_(1 - rate * decay).sub_(direction.mul_(rate))
            momentum.mul_(beta2).add_(gradient * (1 - beta2))
