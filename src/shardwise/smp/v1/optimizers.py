"""`smp.optimizers`: the two optimizers of apex that SMP's scripts import, in plain torch.

Both scale each parameter's update by norms of whole tensors, so that a distributed model is refused where its tensors
are in parts. Steps are counted in the groups, as apex does: schedules of its users read `group["step"]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwise.errors import ModelError

_DENOMINATOR = 1e-6  # as in torch's clip_grad_norm_


class FusedLAMB(Optimizer):
    """LAMB (You et al., arXiv 1904.00962, algorithm 2), after clipping by the norm of all gradients together.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        bias_correction: divide the moments by 1 - beta^step.
        betas: decay of the first and of the second moment.
        eps: added to the root of the second moment.
        weight_decay: added to the update (`adam_w_mode`), or to the gradient.
        amsgrad: not to be had.
        adam_w_mode: where weight decay acts.
        grad_averaging: weight new gradients by 1 - beta1 in the first moment.
        set_grad_none: accepted; gradients are dropped by `zero_grad` in any case.
        max_grad_norm: 0 switches clipping off.
        use_nvlamb: scale updates of parameters without weight decay too.

    Raises:
        ModelError: `amsgrad` is asked for.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-6, weight_decay: float = 0.01,
        amsgrad: bool = False, adam_w_mode: bool = True, grad_averaging: bool = True, set_grad_none: bool = True,
        max_grad_norm: float = 1.0, use_nvlamb: bool = False,
    ) -> None:  # fmt: skip
        _refuse_amsgrad("FusedLAMB", amsgrad)
        super().__init__(params, {
            "lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "adam_w_mode": adam_w_mode, "grad_averaging": grad_averaging, "max_grad_norm": max_grad_norm,
            "use_nvlamb": use_nvlamb,
        })  # fmt: skip

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        value = _closed(closure)
        norm = self._norm()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            most = group["max_grad_norm"]
            factor = (most / (norm + _DENOMINATOR)).clamp(max=1.0) if most else torch.ones_like(norm)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad * factor.to(parameter.grad), group)
        return value

    def _norm(self) -> Tensor:
        """Return the norm of all gradients; of the whole model's under `smp.DistributedOptimizer`. Collective then."""
        binding = getattr(self, "_smp", None)
        if binding is not None and binding.parallel is not None:
            norm: Tensor = binding.global_norm()
            return norm
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        return torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros(())

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2), decay = self.state[parameter], group["betas"], group["weight_decay"]
        if not state:
            state |= {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
        if decay and not group["adam_w_mode"]:
            gradient = gradient + decay * parameter
        state["exp_avg"].mul_(beta1).add_(gradient, alpha=1 - beta1 if group["grad_averaging"] else 1.0)
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        first, second = _corrections(group)
        update = state["exp_avg"] / first / ((state["exp_avg_sq"] / second).sqrt() + group["eps"])
        if decay and group["adam_w_mode"]:
            update = update + decay * parameter
        trust = torch.ones((), dtype=update.dtype, device=update.device)
        if decay or group["use_nvlamb"]:
            size, length = parameter.norm(), update.norm()
            trust = torch.where((size > 0) & (length > 0), size / length, trust)
        parameter.sub_(update * trust * group["lr"])


class FusedNovoGrad(Optimizer):
    """NovoGrad (Ginsburg et al., arXiv 1905.11286, algorithm 1): the second moment is one number a tensor.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        bias_correction: divide the moments by 1 - beta^step.
        betas: decay of the first moment and of the squared norm.
        eps: added to the norm.
        weight_decay: added to the update, or with `reg_inside_moment` to the normalised gradient.
        amsgrad: not to be had.
        reg_inside_moment: where weight decay acts.
        grad_averaging: weight new gradients by 1 - beta1 in the first moment.
        norm_type: 2, or 0 for the largest absolute value.
        init_zero: start the second moment at 0, and not at the first gradient's.
        set_grad_none: accepted; gradients are dropped by `zero_grad` in any case.

    Raises:
        ModelError: `amsgrad`, or another norm, is asked for.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0,
        amsgrad: bool = False, reg_inside_moment: bool = False, grad_averaging: bool = True, norm_type: int = 2,
        init_zero: bool = False, set_grad_none: bool = True,
    ) -> None:  # fmt: skip
        _refuse_amsgrad("FusedNovoGrad", amsgrad)
        if norm_type not in (0, 2):
            raise ModelError(f"FusedNovoGrad: norm_type={norm_type!r} must be 2, or 0 for the largest absolute value")
        super().__init__(params, {
            "lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "reg_inside_moment": reg_inside_moment, "grad_averaging": grad_averaging, "norm_type": norm_type,
            "init_zero": init_zero,
        })  # fmt: skip

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        value = _closed(closure)
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return value

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2), decay = self.state[parameter], group["betas"], group["weight_decay"]
        size = gradient.norm() if group["norm_type"] == 2 else gradient.abs().max()
        if not state:
            start = torch.zeros_like(size) if group["init_zero"] else size.square()
            state |= {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": start}
        state["exp_avg_sq"].mul_(beta2).add_(size.square(), alpha=1 - beta2)
        first, second = _corrections(group)
        scaled = gradient / ((state["exp_avg_sq"] / second).sqrt() + group["eps"])
        if decay and group["reg_inside_moment"]:
            scaled = scaled + decay * parameter
        state["exp_avg"].mul_(beta1).add_(scaled, alpha=1 - beta1 if group["grad_averaging"] else 1.0)
        update = state["exp_avg"] / first
        if decay and not group["reg_inside_moment"]:
            update = update + decay * parameter
        parameter.sub_(update, alpha=group["lr"])


FusedLamb = FusedLAMB  # as SMP's documents spell it


def _refuse_amsgrad(name: str, amsgrad: bool) -> None:
    if amsgrad:
        raise ModelError(f"{name}: amsgrad=True is not to be had; leave it out")


def _closed(closure: Callable[[], Any] | None) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _corrections(group: dict[str, Any]) -> tuple[float, float]:
    """Return the divisors of the two moments."""
    if not group["bias_correction"]:
        return 1.0, 1.0
    beta1, beta2 = group["betas"]
    return 1 - beta1 ** group["step"], 1 - beta2 ** group["step"]
