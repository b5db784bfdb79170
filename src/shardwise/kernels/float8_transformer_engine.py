"""Products in float8 by NVIDIA's Transformer Engine: the second door of kernels/float8.py, for one scale a tensor.

Its modules would take the place of the model's layers; used here are its cast, which finds the scale in the numbers of
the call, and its product, so that layers, their shards and their backward stay those of the other doors. Its product
takes both factors with the dim that is summed last, in multiples of 16: shorter ones are filled up with zeros.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

MULTIPLE = 16  # of every dim of a factor, in numbers of one byte


class _Engine(NamedTuple):
    """Names of Transformer Engine that are used."""

    quantizer: Any
    product: Any
    formats: dict[torch.dtype, Any]


@cache
def _engine() -> _Engine:
    import transformer_engine.pytorch  # noqa: F401  (loads the library that the compiled part needs)
    import transformer_engine_torch as compiled
    from transformer_engine.pytorch.cpp_extensions import general_gemm
    from transformer_engine.pytorch.tensor import Float8CurrentScalingQuantizer

    names = {torch.float8_e4m3fn: compiled.DType.kFloat8E4M3, torch.float8_e5m2: compiled.DType.kFloat8E5M2}
    return _Engine(Float8CurrentScalingQuantizer, general_gemm, names)


def product(
    a: Tensor, b: Tensor, formats: tuple[torch.dtype, torch.dtype], powers: tuple[bool, bool], quick: bool
) -> Tensor:
    """[M, K] x [K, N] -> [M, N] in the dtype of `a`.

    Args:
        formats: float8 of `a` and of `b`.
        powers: whether the scale of `a`, and that of `b`, is a power of two.
        quick: sums in fewer bits, which serve an output and not a gradient.
    """
    first, second = (_cast(*factor) for factor in zip((a, b.T), formats, powers))
    product = _engine().product
    whole: Tensor = product(second, first, out_dtype=a.dtype, layout="TN", use_split_accumulator=not quick)[0]
    return whole[: a.shape[0], : b.shape[1]]


def _cast(values: Tensor, dtype: torch.dtype, by_powers: bool) -> Any:
    """[rows, K] in float8, filled up, with its scale."""
    rows, inner = (-size % MULTIPLE for size in values.shape)
    filled = F.pad(values, (0, inner, 0, rows)) if rows or inner else values.contiguous()
    cast = _engine().quantizer(
        _engine().formats[dtype], values.device, rowwise=True, columnwise=False, force_pow_2_scales=by_powers
    )
    return cast(filled)
