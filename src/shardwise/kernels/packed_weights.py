"""Frozen weights in 4 or 8 bits: their packed form, and the product of a linear layer that has one (`adapter.base`).

`nf4` is NormalFloat of four bits with a scale for each 64 elements (QLoRA, arXiv 2305.14314, section 3; the codes are
those of bitsandbytes): an element divided by the largest of its block is rounded to the nearest of 16 values. Scales
are not quantized again: that subtracts their mean over the whole tensor, which no rank has. `int8` has 255 even steps
to the largest of the block. Both are computed in fp32.

The packed form is int8 in bytes [..., blocks, bytes of a block], since modules of transformers that look at a weight's
dtype know int8 to be no dtype of activations. Products are made in the dtype of the activations, with a weight that is
unpacked for each of them; backward keeps the packed one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwise.model.packed_weights import BLOCK, SCALE_BYTES

# Quantiles of a normal distribution, scaled to [-1, 1] (arXiv 2305.14314, appendix E).
NORMAL_FLOAT = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
LARGEST = 127  # of int8's codes; -128 is not used


def packed_form(weight: Tensor, form: str) -> Tensor:
    """Return the packed form of a weight whose last dim consists of whole blocks."""
    blocks = weight.detach().float().unflatten(-1, (-1, BLOCK))
    scale = blocks.abs().amax(-1, keepdim=True)
    parts = blocks / scale.masked_fill(scale == 0, 1.0)
    codes = _four_bits(parts) if form == "nf4" else (parts * LARGEST).round().to(torch.int8)
    return torch.cat([scale.contiguous().view(torch.int8), codes], -1)


def unpacked_weight(packed: Tensor, form: str, dtype: torch.dtype) -> Tensor:
    """Return the weight that a packed form stands for, in `dtype`."""
    packed = packed.to(torch.int8)  # torch 2.11 gathers it in the compute dtype, which holds eight bits
    scale = packed[..., :SCALE_BYTES].contiguous().view(torch.float32)
    codes = packed[..., SCALE_BYTES:].contiguous()
    parts = _of_four_bits(codes) if form == "nf4" else codes.float().div_(LARGEST)
    return parts.mul_(scale).flatten(-2).to(dtype)


def rounded(weight: Tensor, form: str) -> Tensor:
    """Return what the packed form of a weight stands for, in the weight's dtype."""
    return unpacked_weight(packed_form(weight, form), form, weight.dtype)


def packed_product(values: Tensor, packed: Tensor, bias: Tensor | None, form: str, transposed: bool) -> Tensor:
    """Return `values` [..., in] times a packed weight [out, in], or [in, out] where `transposed`; [..., out]."""
    product: Tensor = _PackedProduct.apply(values, packed, form, transposed)
    return product if bias is None else product + bias


class _PackedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, packed: Tensor, form: str, transposed: bool) -> Tensor:
        ctx.form, ctx.transposed = form, transposed
        ctx.save_for_backward(packed)
        weight = unpacked_weight(packed, form, values.dtype)
        return F.linear(values, weight.T if transposed else weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (packed,), gradient = ctx.saved_tensors, gradients[0]
        weight = unpacked_weight(packed, ctx.form, gradient.dtype)
        return gradient @ (weight.T if ctx.transposed else weight), None, None, None


def _four_bits(parts: Tensor) -> Tensor:
    """Return the codes of [..., BLOCK] numbers in [-1, 1], two in a byte, the first in its upper half."""
    values = torch.tensor(NORMAL_FLOAT, device=parts.device)
    codes = torch.bucketize(parts, (values[1:] + values[:-1]) / 2, out_int32=True).to(torch.uint8)
    return (codes[..., ::2] << 4 | codes[..., 1::2]).view(torch.int8)


def _of_four_bits(codes: Tensor) -> Tensor:
    """Return the numbers [..., BLOCK] in fp32 that codes in bytes stand for."""
    values = torch.tensor(NORMAL_FLOAT, device=codes.device)
    pairs = torch.cartesian_prod(values, values)  # of each byte, [256, 2]
    return F.embedding(codes.view(torch.uint8).int(), pairs).flatten(-2)
