"""Noise of 16 bits, measured: one step of the oracle in the job's precision, and in fp32 with the same 16-bit weights.

The distance of the two is what rounding does to each gradient of a right program. Another right program, with another
order of sums, is about as far from either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardwise.model.experts import holds_experts
from shardwise.testing.comparison import Tolerance, compare_numbers, compare_tensors
from shardwise.testing.oracle import Oracle
from shardwise.testing.widening import WithoutNarrowing

DRAWS = 3  # runs with moved numbers beside the first
DRAWS_OF_ROUTERS = 8  # the same where a token may go to other experts
# By how many units their outputs are moved: as far as rounding does, in fp16 further, so that what falls one way or the
# other, which is rare there, is met.
SPREAD = {torch.bfloat16: 0.5, torch.float16: 2.0}


LossAndGradients = tuple[float, Mapping[str, Tensor]]


@dataclass(frozen=True)
class RoundedStep:
    """Loss and gradients of one step by two arithmetics.

    Attributes:
        loss, gradients: what a job in 16 bits is compared with.
        wide: gradients in fp32 at the same 16-bit weights.
        loss_noise: largest distance of a loss in 16 bits from that in fp32.
        noise: the same of gradients, by name, as an L2 norm.
        least_noise: smallest distance of all gradients of a run in 16 bits from those in fp32.
    """

    loss: float
    gradients: Mapping[str, Tensor]
    wide: Mapping[str, Tensor]
    loss_noise: float
    noise: Mapping[str, float]
    least_noise: float


def rounded_step(oracle: Oracle, step: int, dtype: torch.dtype) -> RoundedStep:
    """Run a step of `oracle` in `dtype` and in fp32; its weights stay as they are.

    Where the oracle itself computes in fp32 (fp16 needs a loss scale, a user's module has buffers that nothing casts),
    the rounding of weights and of modules' outputs is emulated, and fp32 is what a job is compared with.
    """
    if oracle.compute == dtype:
        compared = narrow = _run(oracle, step)
        with _widened(oracle):
            wide, others = _run(oracle, step), _rounded_elsewhere(oracle, step, dtype)
    else:
        with _rounded_weights(oracle, dtype):
            with _rounded_outputs(oracle.models(), dtype):
                narrow = _run(oracle, step)
            compared = wide = _run(oracle, step)
            others = _rounded_elsewhere(oracle, step, dtype)
    runs = [narrow, *others]
    loss_noise = max(abs(loss - wide[0]) for loss, _ in runs)
    distances = [_distances(gradients, wide[1], dtype) for _, gradients in runs]
    noise = {name: max(own[name] for own in distances) for name in wide[1]}
    return RoundedStep(*compared, wide[1], loss_noise, noise, min(math.hypot(*own.values()) for own in distances))


def _run(oracle: Oracle, step: int) -> LossAndGradients:
    loss = oracle.backward(step)
    return loss, oracle.gradients


def _rounded_elsewhere(oracle: Oracle, step: int, dtype: torch.dtype) -> list[LossAndGradients]:
    """Return a few runs whose outputs are moved by about as much as rounding does.

    Some of the noise is chance: a ReLU whose input is nearly zero, or a router between two experts that are nearly a
    tie, falls one way or the other. One run may have none of that, where another has some.
    """
    runs = []
    has_routers = any(holds_experts(module) for module in oracle.model.modules())
    for draw in range(DRAWS_OF_ROUTERS if has_routers else DRAWS):
        with _rounded_outputs(oracle.models(), dtype, torch.Generator().manual_seed(draw)):
            runs.append(_run(oracle, step))
    return runs


def _distances(narrow: Mapping[str, Tensor], wide: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, float]:
    """Return the distance of two gradients, and at least the rounding of the largest gradient of the same module.

    What a bias of keys gets is a sum of larger gradients that would be zero, but for rounding.
    """
    sizes: dict[str, float] = {}
    for name, value in wide.items():
        owner = name.rpartition(".")[0]
        sizes[owner] = max(sizes.get(owner, 0.0), float(value.double().norm()))
    eps = torch.finfo(dtype).eps
    return {
        name: max(float((value.double() - wide[name].double()).norm()), eps * sizes[name.rpartition(".")[0]])
        for name, value in narrow.items()
    }


@contextmanager
def _widened(oracle: Oracle) -> Iterator[None]:
    """Compute in the master's dtype inside, with the weights as they are."""
    compute, oracle.compute = oracle.compute, oracle.master
    parameters = [parameter for model in oracle.models() for parameter in model.parameters()]
    narrow = [parameter.data for parameter in parameters]
    for parameter in parameters:
        parameter.data = parameter.data.to(oracle.master)
    try:
        yield
    finally:
        oracle.compute = compute
        for parameter, data in zip(parameters, narrow, strict=True):
            parameter.data = data


@contextmanager
def _rounded_weights(oracle: Oracle, dtype: torch.dtype) -> Iterator[None]:
    """Compute with weights rounded to `dtype` inside; the optimizer's own are as before afterwards."""
    parameters = [parameter for model in oracle.models() for parameter in model.parameters()]
    whole = [parameter.data for parameter in parameters]
    for parameter in parameters:
        parameter.data = parameter.data.to(dtype).to(parameter.dtype)
    try:
        yield
    finally:
        for parameter, data in zip(parameters, whole, strict=True):
            parameter.data = data


def inner_rounding(oracle: Oracle, step: int) -> float:
    """Return how far fp32 inside an oracle moves its loss and gradients, relative to the loss and to each tensor.

    It is the most of a few runs: one without that fp32, where the model can do without, and some in which what is cast
    to fp32, or computed in it, is moved by about as much as rounding does.
    """
    loss, gradients = _run(oracle, step)
    moved = []
    with suppress(RuntimeError), WithoutNarrowing():
        moved.append(_run(oracle, step))
    for draw in range(DRAWS):
        with _MovedSingles(draw):
            moved.append(_run(oracle, step))
    differences = (compare_tensors(0, "", gradients, others, Tolerance(0.0)) for _, others in moved)
    errors = [difference.error for compared in differences for difference in compared]
    return max(*errors, *(compare_numbers(0, "", loss, other, Tolerance(0.0)).error for other, _ in moved))


def loss_rounding(evaluate: Callable[[], float]) -> float:
    """Return how far rounding in fp32 moves the loss that `evaluate` returns, relative to it; the most of a few runs.

    A loss may be a difference that nearly cancels (IPO's is the square of one), which no tolerance fits that was set
    for a sum.
    """
    right, moved = evaluate(), []
    for draw in range(DRAWS):
        with _MovedSingles(draw):
            moved.append(evaluate())
    return max(compare_numbers(0, "", loss, right, Tolerance(0.0)).error for loss in moved)


class _MovedSingles(TorchFunctionMode):
    """Moves what functions make in fp32, of fp64 or by arithmetic, by up to one unit in the last place."""

    def __init__(self, draw: int) -> None:
        super().__init__()
        self._draws = torch.Generator().manual_seed(draw)

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if not isinstance(result, Tensor) or result.dtype != torch.float32 or result.device.type != "cpu":
            return result
        is_cast = bool(args) and isinstance(args[0], Tensor) and args[0].dtype == torch.float64
        if not is_cast and function not in PRODUCTS | ROUNDING:
            return result
        reach = torch.rand(result.shape, generator=self._draws) - 0.5
        return result * (1.0 + 2.0 * torch.finfo(torch.float32).eps * reach)


class _Rounding(torch.autograd.Function):
    """Round values in forward and their gradients in backward; a gradient's range is that of a loss scale."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = dtype
        return values.to(dtype).to(values.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        # bf16 has the range; what fp16 keeps below its smallest normal number is a matter of the scale.
        eps = torch.finfo(ctx.dtype).eps
        mantissa, exponent = torch.frexp(gradients[0])
        return torch.ldexp((mantissa / eps).round() * eps, exponent), None


PRODUCTS = {
    nn.functional.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.mm, Tensor.mm,
    torch.addmm, torch.baddbmm, torch.einsum,
}  # fmt: skip


# Arithmetic that rounds, and makes a tensor of its own.
ROUNDING = {
    torch.mul, torch.add, torch.sub, torch.div, torch.exp, torch.sum, torch.mean, torch.cumsum, torch.sigmoid,
    torch.softmax, torch.rsqrt, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.add, Tensor.__add__,
    Tensor.__radd__, Tensor.__sub__, Tensor.__rsub__, Tensor.__truediv__, Tensor.div, Tensor.exp, Tensor.sum,
    Tensor.mean, Tensor.cumsum, Tensor.sigmoid, Tensor.softmax, nn.functional.softmax, nn.functional.silu,
    nn.functional.softplus, nn.functional.sigmoid,
}  # fmt: skip


class _RoundedProducts(TorchFunctionMode):
    """Changes the products that modules make inside: scores of routers, hidden states of experts."""

    def __init__(self, change: Callable[[Any], Any]) -> None:
        super().__init__()
        self.change = change

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        return self.change(result) if function in PRODUCTS else result


@contextmanager
def _rounded_outputs(
    models: Sequence[nn.Module], dtype: torch.dtype, draw: torch.Generator | None = None
) -> Iterator[None]:
    """Round products and the outputs of modules without children inside; with `draw` they are moved before."""
    reach = SPREAD[dtype] * torch.finfo(dtype).eps

    def rounded(output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return output
        if draw is not None:
            output = output * (1 + reach * (2 * torch.rand(output.shape, generator=draw, dtype=output.dtype) - 1))
        return _Rounding.apply(output, dtype)

    leaves = [module for model in models for module in model.modules() if next(module.children(), None) is None]
    handles = [module.register_forward_hook(lambda module, inputs, output: rounded(output)) for module in leaves]
    try:
        with _RoundedProducts(rounded):
            yield
    finally:
        for handle in handles:
            handle.remove()
