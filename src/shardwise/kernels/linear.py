"""Linear layers whose weight gradients can wait: the split of backward that zero-bubble schedules ask for.

Backward of a linear layer is two matrix products. The input's gradient is what the stage before waits for; the
weight's can be taken later, where the rank would idle (Zero Bubble, arXiv 2401.10241, section 2). A deferred layer
computes the first in backward and notes the second, with the input and the output's gradient that it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D


class WeightGradients:
    """The weight gradients of one stage that backward has left for later."""

    def __init__(self) -> None:
        self.pending: list[Callable[[], None]] = []

    def take(self) -> Callable[[], None]:
        """What computes all that are pending, and adds them to the parameters' gradients; nothing is pending then."""
        taken, self.pending = self.pending, []

        @torch.no_grad()
        def run() -> None:
            for compute in taken:
                compute()
            taken.clear()

        return run


def linear(module: Any, values: Tensor, transposed: bool = False, biased: bool = True) -> Tensor:
    """`values @ weight.T + bias` of `module`, whose weight is [out, in], or [in, out] where `transposed`.

    Where `defer_weight_gradients` has been told of the module, its weight gradients wait.
    """
    bias = module.bias if biased else None
    later: WeightGradients | None = getattr(module, "weight_gradients", None)
    if later is not None and torch.is_grad_enabled():
        product: Tensor = _Deferred.apply(values, module.weight, bias, module, transposed, later)
        return product
    return F.linear(values, module.weight.T if transposed else module.weight, bias)


def defer_weight_gradients(blocks: Iterable[nn.Module]) -> WeightGradients:
    """Let the linear layers of `blocks` leave their weight gradients for later; those that tensor parallelism has
    rewritten call `linear` already."""
    later = WeightGradients()
    for module in [module for block in blocks for module in block.modules()]:
        if type(module) not in (nn.Linear, Conv1D):
            continue
        module.weight_gradients = later  # type: ignore[assignment]
        if "forward" not in vars(module):
            module.forward = partial(linear, module, transposed=type(module) is Conv1D)  # type: ignore[method-assign]
    return later


class _Deferred(torch.autograd.Function):
    """The module is asked for its weight when backward runs: FSDP2 then holds it gathered, and activation checkpointing
    would hand out a copy of it."""

    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        module: Any,
        transposed: bool,
        later: WeightGradients,
    ) -> Tensor:
        ctx.module, ctx.transposed, ctx.later = module, transposed, later
        ctx.save_for_backward(values)
        return F.linear(values, weight.T if transposed else weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (values,), gradient = ctx.saved_tensors, gradients[0]
        _, of_weight, of_bias, *_ = ctx.needs_input_grad
        weight, bias = ctx.module.weight, ctx.module.bias
        if of_weight:
            ctx.later.pending.append(partial(_add_product, weight, values, gradient, ctx.transposed))
        if of_bias:
            ctx.later.pending.append(partial(_add_sum, bias, gradient))
        return gradient @ (weight.T if ctx.transposed else weight), None, None, None, None, None


def _add_product(weight: Tensor, values: Tensor, gradient: Tensor, transposed: bool) -> None:
    inputs, outputs = values.flatten(0, -2), gradient.flatten(0, -2)
    _add(weight, inputs.T @ outputs if transposed else outputs.T @ inputs)


def _add_sum(bias: Tensor, gradient: Tensor) -> None:
    _add(bias, gradient.flatten(0, -2).sum(0))


def _add(parameter: Tensor, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient
