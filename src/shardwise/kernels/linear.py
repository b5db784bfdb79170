"""Linear layers that are more than one matrix product: in float8, with weight gradients that wait, or of whole
activations of which backward keeps a part.

Backward of a linear layer is two matrix products. The input's gradient is what the stage before waits for; the
weight's can be taken later, where the rank would idle (Zero Bubble, arXiv 2401.10241, section 2). A deferred layer
computes the first in backward and notes the second, with the input, or the part of it that is kept, and the output's
gradient that it needs.

A module that has `float8` (kernels/float8.py) multiplies so, whichever of these it is. One that has an `adapter`
(kernels/adapters.py) adds its product to its own. The weight of one that has a `packing`
(kernels/packed_weights.py) is in 4 or 8 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from shardwise.collectives.tensor import RegatheredActivations
from shardwise.kernels.adapters import LowRankProduct, Multiply
from shardwise.kernels.float8 import Float8
from shardwise.kernels.packed_weights import packed_product


class WeightGradient(NamedTuple):
    """A gradient that can be computed later: `compute` adds it to `.grad` of a parameter of `module`.

    `begin` starts to fetch what it needs, beside what is computed until then.
    """

    module: nn.Module
    compute: Callable[[], None]
    begin: Callable[[], None] = lambda: None


class WeightGradients:
    """The weight gradients of one stage that backward leaves for later.

    Attributes:
        waits: whether a backward that runs now leaves them, or has them computed at once.
        pending: those that were left, in the order of backward.
        sums: of a module, what adds its `.grad` to that of earlier backwards, if that is kept elsewhere.
    """

    def __init__(self) -> None:
        self.waits = True
        self.pending: list[WeightGradient] = []
        self.sums: dict[nn.Module, Callable[[], None]] = {}

    def leave(self, gradient: WeightGradient) -> None:
        """Leave a gradient for later, or compute it."""
        if self.waits:
            self.pending.append(gradient)
        else:
            gradient.begin()
            self._compute(gradient)

    def take(self) -> Callable[[], None]:
        """Return a function that computes all that are pending; then none is pending."""
        taken, self.pending = self.pending, []

        @torch.no_grad()
        def run() -> None:
            while taken:  # each lets go of what it needed before the next
                for soon in taken[:2]:
                    soon.begin()
                self._compute(taken.pop(0))

        return run

    def _compute(self, gradient: WeightGradient) -> None:
        gradient.compute()
        if gradient.module in self.sums:
            self.sums[gradient.module]()


def linear(module: Any, values: Tensor, transposed: bool = False, biased: bool = True) -> Tensor:
    """`values @ weight.T + bias` of `module`, whose weight is [out, in], or [in, out] where `transposed`.

    Where `defer_weight_gradients` has been told of the module, its weight gradients wait; where `use_float8` has, its
    products are in float8; where `use_adapter` has, the adapter's are added.
    """
    bias = module.bias if biased else None
    return _adapted(module, values, bias, lambda own_bias: _product(module, values, own_bias, transposed), F.linear)


def _adapted(
    module: Any, values: Tensor, bias: Tensor | None, own_product: Callable[[Tensor | None], Tensor], multiply: Multiply
) -> Tensor:
    """Return the layer's own product, which is given the bias that it adds, with that of its adapter if it has one."""
    adapter: LowRankProduct | None = getattr(module, "adapter", None)
    if adapter is None:
        return own_product(bias)
    if not adapter.scales_rows:
        return adapter(values, own_product(bias), multiply)
    adapted = adapter(values, own_product(None), multiply)
    return adapted if bias is None else adapted + bias


def _product(module: Any, values: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    packing: str | None = getattr(module, "packing", None)
    if packing is not None:
        return packed_product(values, module.weight, bias, packing, transposed)
    float8: Float8 | None = getattr(module, "float8", None)
    later: WeightGradients | None = getattr(module, "weight_gradients", None)
    if later is not None and torch.is_grad_enabled():
        product: Tensor = _Deferred.apply(values, values, module.weight, bias, module, transposed, later, None)
        return product
    weight = module.weight.T if transposed else module.weight
    if float8 is None:
        return F.linear(values, weight, bias)
    rounded: Tensor = _InFloat8.apply(values, weight, float8)
    return rounded if bias is None else rounded + bias


def linear_of_parts(
    module: Any, whole: Tensor, part: Tensor, transposed: bool, source: RegatheredActivations
) -> Tensor:
    """Run `linear` so that backward gathers `whole` again from each rank's `part` of it."""

    def multiply(values: Tensor, weight: Tensor, bias: Tensor | None = None, float8: Float8 | None = None) -> Tensor:
        product: Tensor = _LinearOfParts.apply(values, part.detach(), weight, bias, source, float8)
        return product

    def own_product(bias: Tensor | None) -> Tensor:
        packing: str | None = getattr(module, "packing", None)
        if packing is not None:  # frozen: backward reads no activations for it
            return packed_product(whole, module.weight, bias, packing, transposed)
        later: WeightGradients | None = getattr(module, "weight_gradients", None)
        if later is not None and torch.is_grad_enabled():
            inputs = (whole, part.detach(), module.weight, bias, module, transposed, later, source)
            product: Tensor = _Deferred.apply(*inputs)
            return product
        weight = module.weight.T if transposed else module.weight
        return multiply(whole, weight, bias, getattr(module, "float8", None))

    return _adapted(module, whole, module.bias, own_product, multiply)


def defer_weight_gradients(blocks: Iterable[nn.Module]) -> WeightGradients:
    """Let the linear layers of `blocks` leave their weight gradients for later."""
    later = WeightGradients()
    for module in [module for block in blocks for module in block.modules()]:
        if type(module) in (nn.Linear, Conv1D):
            module.weight_gradients = later  # type: ignore[assignment]
            _use_linear(module)
    return later


def use_float8(modules: Iterable[nn.Module], float8: Float8 | None) -> None:
    """Let the linear layers `modules` multiply in float8; None: not yet, until their `float8` is set."""
    for module in modules:
        module.float8 = float8  # type: ignore[assignment]
        _use_linear(module)


def use_adapter(module: nn.Module, adapter: LowRankProduct) -> None:
    """Let a linear layer add the product of its adapter."""
    module.adapter = adapter  # type: ignore[assignment]
    _use_linear(module)


def use_packing(module: nn.Module, form: str) -> None:
    """Let a linear layer multiply with a weight that is packed in `form`."""
    module.packing = form  # type: ignore[assignment]
    _use_linear(module)


def _use_linear(module: nn.Module) -> None:
    """Let the module's forward be `linear`; those that tensor parallelism has rewritten call it already."""
    if "forward" not in vars(module):
        module.forward = partial(linear, module, transposed=type(module) is Conv1D)  # type: ignore[method-assign]


def _output(values: Tensor, weight: Tensor, bias: Tensor | None, float8: Float8 | None) -> Tensor:
    """[..., in] of values and [out, in] of weight -> [..., out]."""
    if float8 is None:
        return F.linear(values, weight, bias)
    output = float8.product(values.flatten(0, -2), weight.T, "output").view(*values.shape[:-1], -1)
    return output if bias is None else output + bias


def _of_values(gradient: Tensor, weight: Tensor, float8: Float8 | None) -> Tensor:
    """The gradient [..., out] of the output and the weight [out, in] -> the gradient [..., in] of the input."""
    if float8 is None:
        return gradient @ weight
    product = float8.product(gradient.flatten(0, -2), weight, "input gradient")
    return product.view(*gradient.shape[:-1], -1)


def _of_weight(gradient: Tensor, values: Tensor, float8: Float8 | None) -> Tensor:
    """[..., out] and [..., in] -> the gradient [out, in] of the weight."""
    outputs, inputs = gradient.flatten(0, -2), values.flatten(0, -2)
    return outputs.T @ inputs if float8 is None else float8.product(outputs.T, inputs, "weight gradient")


@torch.compiler.allow_in_graph  # the compiler's front end need not understand torchao's tensors; what is behind it does
class _InFloat8(torch.autograd.Function):
    """Saves what a linear layer saves, in its own dtype; both factors are rounded again in backward, along the dim that
    is summed there."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, float8: Float8) -> Tensor:
        ctx.float8 = float8
        ctx.save_for_backward(values, weight)
        return _output(values, weight, None, float8)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (values, weight), gradient = ctx.saved_tensors, gradients[0]
        of_values, of_weight, _ = ctx.needs_input_grad
        return (
            _of_values(gradient, weight, ctx.float8) if of_values else None,
            _of_weight(gradient, values, ctx.float8) if of_weight else None,
            None,
        )


class _LinearOfParts(torch.autograd.Function):
    """A linear of whole activations that saves a part of them."""

    @staticmethod
    def forward(
        ctx: Any,
        whole: Tensor,
        part: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        source: RegatheredActivations,
        float8: Float8 | None,
    ) -> Tensor:
        source.readers += ctx.needs_input_grad[2]  # the others need no activations in backward
        ctx.source, ctx.float8 = source, float8
        ctx.save_for_backward(part, weight)
        return _output(whole, weight, bias, float8)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        part, weight = ctx.saved_tensors
        gradient = gradients[0]
        _, _, of_weight, of_bias, *_ = ctx.needs_input_grad
        if of_weight:
            ctx.source.ask(part)
        return (
            _of_values(gradient, weight, ctx.float8),
            None,
            _of_weight(gradient, ctx.source.again(), ctx.float8) if of_weight else None,
            gradient.flatten(0, -2).sum(0) if of_bias else None,
            None,
            None,
        )


class _Deferred(torch.autograd.Function):
    """The module is asked for its weight when backward runs: FSDP2 then holds it gathered, and activation checkpointing
    would hand out a copy of it."""

    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        kept: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        module: Any,
        transposed: bool,
        later: WeightGradients,
        source: RegatheredActivations | None,
    ) -> Tensor:
        if source is not None:
            source.readers += ctx.needs_input_grad[2]
        ctx.module, ctx.transposed, ctx.later, ctx.source = module, transposed, later, source
        ctx.save_for_backward(kept)
        return _output(values, weight.T if transposed else weight, bias, getattr(module, "float8", None))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (kept,), gradient, module, later = ctx.saved_tensors, gradients[0], ctx.module, ctx.later
        _, _, of_weight, of_bias, *_ = ctx.needs_input_grad
        product = _later_product(module, kept, ctx.source, gradient, ctx.transposed)
        if of_weight and not later.waits:
            product.begin()
        weight = module.weight.T if ctx.transposed else module.weight
        of_values = _of_values(gradient, weight, getattr(module, "float8", None))
        if of_weight:
            later.leave(product)
        if of_bias:
            later.leave(WeightGradient(module, partial(_add_sum, module.bias, gradient)))
        return of_values, *[None] * 7


def _later_product(
    module: Any, kept: Tensor, source: RegatheredActivations | None, gradient: Tensor, transposed: bool
) -> WeightGradient:
    """Return the gradient of a layer's weight, from its input that is `kept` whole, or gathered again by `source`."""
    if source is None:
        return WeightGradient(module, partial(_add_product, module, lambda: kept, gradient, transposed))
    compute = partial(_add_product, module, source.again, gradient, transposed)
    return WeightGradient(module, compute, partial(source.ask, kept))


def _add_product(module: Any, values: Callable[[], Tensor], gradient: Tensor, transposed: bool) -> None:
    product = _of_weight(gradient, values(), getattr(module, "float8", None))
    _add(module.weight, product.T if transposed else product)


def _add_sum(bias: Tensor, gradient: Tensor) -> None:
    _add(bias, gradient.flatten(0, -2).sum(0))


def _add(parameter: Tensor, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient.contiguous()  # fused optimizers read it in the order of the parameter
    else:
        parameter.grad += gradient
