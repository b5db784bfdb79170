"""Noise of 16 bits, measured: one step of the oracle in the job's precision, and in fp32 with the same 16-bit weights.

The distance of the two is what rounding does to each gradient of a right program. Another right program, with another
order of sums, is about as far from either.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.testing.comparison import Tolerance, compare_tensors
from shardwise.testing.oracle import Oracle
from shardwise.testing.widening import WithoutNarrowing

UNKNOWN_ROUNDING = 1e-6


@dataclass(frozen=True)
class RoundedStep:
    """Loss and gradients of one step by two arithmetics.

    Attributes:
        loss, gradients: what a job in 16 bits is compared with.
        wide: gradients in fp32 at the same 16-bit weights.
        loss_noise: distance of the two losses.
        noise: distance of the two gradients, by name, as an L2 norm.
    """

    loss: float
    gradients: Mapping[str, Tensor]
    wide: Mapping[str, Tensor]
    loss_noise: float
    noise: Mapping[str, float]


def rounded_step(oracle: Oracle, step: int, dtype: torch.dtype) -> RoundedStep:
    """Run a step of `oracle` in `dtype` and in fp32; its weights stay as they are.

    Where the oracle itself computes in fp32 (fp16 needs a loss scale, a user's module has buffers that nothing casts),
    the rounding of weights and of modules' outputs is emulated, and fp32 is what a job is compared with.
    """
    if oracle.compute == dtype:
        loss, narrow = oracle.backward(step), oracle.gradients
        with _widened(oracle):
            wide_loss, wide = oracle.backward(step), oracle.gradients
        return RoundedStep(loss, narrow, wide, abs(loss - wide_loss), _distances(narrow, wide, dtype))
    with _rounded_weights(oracle, dtype):
        with _rounded_outputs(oracle.models(), dtype):
            loss, narrow = oracle.backward(step), oracle.gradients
        wide_loss, wide = oracle.backward(step), oracle.gradients
    return RoundedStep(wide_loss, wide, wide, abs(loss - wide_loss), _distances(narrow, wide, dtype))


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
    """Return how far the gradients of an fp64 oracle move, relative to each tensor, where fp32 inside it is left out.

    1e-6 where the model cannot do without.
    """
    oracle.backward(step)
    narrow = oracle.gradients
    try:
        with WithoutNarrowing():
            oracle.backward(step)
    except RuntimeError:
        return UNKNOWN_ROUNDING
    found = compare_tensors(0, "", narrow, oracle.gradients, Tolerance(0.0))
    return max(difference.error for difference in found)


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


@contextmanager
def _rounded_outputs(models: Sequence[nn.Module], dtype: torch.dtype) -> Iterator[None]:
    """Round the outputs of modules without children inside."""

    def rounded(module: nn.Module, inputs: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return output
        return _Rounding.apply(output, dtype)

    leaves = [module for model in models for module in model.modules() if next(module.children(), None) is None]
    handles = [module.register_forward_hook(rounded) for module in leaves]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
