"""AdamW that keeps both moments in bf16.

The update is computed in the parameter's dtype and moments are rounded to the nearest when they are kept. bf16 has
eight significant bits: a moment that decays by less than 2**-8 a step would be rounded back to what it was and never
fall, so betas end at 0.99, and the second is 0.95 unless the job says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from shardwise.training.optimizers.adamw import AdamWStep, adamw_update, next_moments
from shardwise.training.optimizers.checks import check_betas, check_rates
from shardwise.training.optimizers.slice_optimizer import SliceOptimizer, chunks_of

SLOWEST = 0.99


class AdamWBf16(SliceOptimizer):
    """AdamW with moments in bf16, rounded to the nearest."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        check_rates(lr, weight_decay, eps)
        betas = check_betas(betas, SLOWEST)
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def update(self, group: Mapping[str, Any], parameter: nn.Parameter) -> None:
        """Update one parameter and its moments."""
        assert parameter.grad is not None
        state = self.state_of(parameter)
        state["step"] += 1
        at = AdamWStep.of(group, state["step"])
        for weight, gradient, first, second in chunks_of(
            [parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"]]
        ):
            moments = next_moments(at, gradient, first.to(weight.dtype), second.to(weight.dtype))
            first.copy_(moments[0])
            second.copy_(moments[1])
            adamw_update(at, weight, *moments)
