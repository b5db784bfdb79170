"""Matrix products in float8 with dynamic scaling: what `precision.fp8` makes of linear layers.

Both factors of a product are scaled so that their largest number is the largest of float8, rounded to it, multiplied
with sums in fp32, and the scales divided out (Micikevicius et al., "FP8 Formats for Deep Learning", arXiv 2209.05433).
Scales are taken from the numbers of each call. `tensorwise` has one for a tensor: e4m3 for activations and weights,
e5m2 for gradients (section 3 of the paper). `rowwise` has one for each row of the first and column of the second
factor, a power of two, and e4m3 throughout. These are the recipes of torchao.

On a GPU torchao casts and multiplies, or Transformer Engine (kernels/float8_transformer_engine.py). The emulation does
the same arithmetic with torch alone, on any device: factors are rounded to float8 and multiplied in fp32. It is
bit-equal to torchao's own emulation, which a test looks at.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SMALLEST = 1e-12  # a tensor of zeros is scaled as if this were its largest number
# What is multiplied: the layer's output, its input's gradient, its weight's gradient. The roles are torchao's.
ROLES = {
    "output": ("INPUT", "WEIGHT"),
    "input gradient": ("GRAD_OUTPUT", "WEIGHT"),
    "weight gradient": ("GRAD_OUTPUT", "INPUT"),
}


@dataclass(frozen=True)
class Float8:
    """A linear layer's way to multiply.

    Attributes:
        provider: `emulate`, or `torchao` or `transformer_engine` for the hardware's products.
        scaling: `tensorwise` or `rowwise`.
        gathered: weights come rounded to float8 by a power of two (kernels/float8_gather.py), so this one is too.
    """

    provider: str
    scaling: str
    gathered: bool = False

    def product(self, a: Tensor, b: Tensor, what: str) -> Tensor:
        """[M, K] x [K, N] -> [M, N] in the dtype of `a`.

        Args:
            a: activations, or the gradient of the layer's output; a transposed view will do.
            b: weight or activations.
            what: a key of ROLES.
        """
        if self.provider == "torchao":
            return _by_torchao(a, b, what, self, emulate=False)
        rowwise, dtype = self.scaling == "rowwise", gradient_format(self.scaling) if what != "output" else E4M3
        if self.provider == "transformer_engine":
            from shardwise.kernels import float8_transformer_engine

            powers = (False, self.by_powers(ROLES[what][1]))
            return float8_transformer_engine.product(a, b, (dtype, E4M3), powers, quick=what == "output")
        first = quantize(a, dtype, 1 if rowwise else None)
        second = quantize(b, E4M3, 0 if rowwise else None, self.by_powers(ROLES[what][1]))
        return ((first.values.float() / first.scale) @ (second.values.float() / second.scale)).to(a.dtype)

    def by_powers(self, role: str) -> bool:
        """Return True if the scale of a factor is a power of two."""
        return self.scaling == "rowwise" or (self.gathered and role == "WEIGHT")


class Quantized(NamedTuple):
    """Numbers in float8 and what they were multiplied with, fp32: 0-dim, or 1 along the dim that a scale goes over."""

    values: Tensor
    scale: Tensor


def gradient_format(scaling: str) -> torch.dtype:
    """Return e5m2, which reaches further, or e4m3, which is finer, where a scale for each row leaves range enough."""
    return E4M3 if scaling == "rowwise" else E5M2


def quantize(values: Tensor, dtype: torch.dtype, dim: int | None = None, by_powers: bool = False) -> Quantized:
    """`values` in float8 `dtype`, with one scale for all, or one for each line along `dim`, then a power of two.

    `by_powers` makes the one for all a power of two as well.
    """
    size = values.detach().abs()
    most = size.amax() if dim is None else size.amax(dim, keepdim=True)
    largest = torch.finfo(dtype).max
    scale = (largest / most.to(torch.float64).clamp(min=SMALLEST)).to(torch.float32)
    if dim is not None or by_powers:
        scale = scale.log2().floor().exp2()
    return Quantized((values.float() * scale).clamp(-largest, largest).to(dtype), scale)


class _Torchao(NamedTuple):
    """Names of torchao that are used."""

    cast: Any
    granularity: Any
    role: Any
    settings: dict[bool, Any]  # emulated or not -> how the three products of a layer are run
    formats: dict[torch.dtype, torch.dtype]  # what this device calls e4m3 and e5m2


@cache
def _torchao() -> _Torchao:
    from torchao.float8 import (
        GemmInputRole,
        LinearMMConfig,
        ScaledMMConfig,
        ScalingGranularity,
        convert_to_float8_training,
    )
    from torchao.float8.config import e4m3_dtype, e5m2_dtype
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic

    # Nothing to convert in it; but this is where torchao repairs what some versions of Inductor make of float8.
    convert_to_float8_training(torch.nn.Module())

    def settings(emulate: bool) -> Any:
        """Quick sums for the output, exact ones for gradients; inner dims are padded to 16 where they have to be."""
        return LinearMMConfig(*(ScaledMMConfig(emulate, quick, False, True) for quick in (True, False, False)))

    return _Torchao(
        hp_tensor_to_float8_dynamic,
        ScalingGranularity,
        GemmInputRole,
        {emulate: settings(emulate) for emulate in (True, False)},
        {E4M3: e4m3_dtype, E5M2: e5m2_dtype},
    )


def _by_torchao(a: Tensor, b: Tensor, what: str, how: Float8, emulate: bool) -> Tensor:
    ao, rowwise = _torchao(), how.scaling == "rowwise"
    granularity = ao.granularity.AXISWISE if rowwise else ao.granularity.TENSORWISE
    first = E4M3 if what == "output" else gradient_format(how.scaling)

    def cast(values: Tensor, dtype: torch.dtype, role: str, dim: int) -> Tensor:
        made: Tensor = ao.cast(
            values,
            ao.formats[dtype],
            ao.settings[emulate],
            gemm_input_role=ao.role[role],
            scaling_granularity=granularity,
            axiswise_dim=dim if rowwise else None,
            round_scales_to_power_of_2=how.by_powers(role),
        )
        return made

    roles = ROLES[what]
    return torch.mm(cast(a, first, roles[0], -1), cast(b, E4M3, roles[1], 0))
