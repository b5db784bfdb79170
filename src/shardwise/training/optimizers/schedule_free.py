"""Schedule-free AdamW (arXiv 2405.15682): an average of weights takes the place of a falling learning rate.

Gradients are taken at y, which is what the parameters are while training; z is moved by them as AdamW moves weights,
and x is the average of z, weighted by the square of the largest learning rate so far. y = (1 - beta1) z + beta1 x, so x
follows from y and z and is not kept. It is x that is evaluated and exported (`Average` in the record of the class).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from shardwise.job.optimizer_records import BETAS
from shardwise.training.optimizers.checks import check_betas, check_rates
from shardwise.training.optimizers.slice_optimizer import SliceOptimizer, chunks_of


class ScheduleFreeAdamW(SliceOptimizer):
    """AdamW without a schedule; `r` is the power of a step's number in its weight, `weight_lr_power` of its rate."""

    def __init__(
        self,
        params: Any,
        lr: float = 2.5e-3,
        betas: tuple[float, float] = BETAS,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        r: float = 0.0,
        weight_lr_power: float = 2.0,
    ) -> None:
        check_rates(lr, weight_decay, eps)
        betas = check_betas(betas)
        if betas[0] == 0.0:
            raise ValueError("Invalid betas: the first is above 0, or the parameters would not hold the average")
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "r": r,
                "weight_lr_power": weight_lr_power,
            },
        )

    def state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Return the state beside a parameter; z begins where the parameter is."""
        is_new = not self.state[parameter]
        state = super().state_of(parameter)
        if is_new:
            state["z"].copy_(parameter)
            state |= {"largest_rate": 0.0, "weights": 0.0}
        return state

    def update(self, group: Mapping[str, Any], parameter: nn.Parameter) -> None:
        """Update y, z and the squares."""
        assert parameter.grad is not None
        state, rate, (beta1, beta2) = self.state_of(parameter), group["lr"], group["betas"]
        share = _share_of_step(group, state)
        correction = 1 - beta2 ** state["step"]
        pull = rate * (1 - beta1 * (1 - share))
        tensors = [parameter, parameter.grad, state["z"], state["exp_avg_sq"]]
        for weight, gradient, ahead, squares in chunks_of(tensors):
            squares.mul_(beta2).add_(gradient.square().mul_(1 - beta2))
            move = gradient / (squares / correction).sqrt_().add_(group["eps"])
            move.add_(weight * group["weight_decay"])
            weight.add_((ahead - weight).mul_(share)).sub_(move * pull)
            ahead.sub_(move.mul_(rate))


def _share_of_step(group: Mapping[str, Any], state: dict[str, Any]) -> float:
    """Return the share that a step's z has in the average x, and count the step."""
    state["step"] += 1
    state["largest_rate"] = max(group["lr"], state["largest_rate"])
    weight = state["step"] ** group["r"] * state["largest_rate"] ** group["weight_lr_power"]
    state["weights"] += weight
    return weight / state["weights"] if state["weights"] else 0.0
