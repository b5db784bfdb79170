"""Numbers in codes of one byte, with a scale for each block along the last dim: moments of optimizers in 8 bits.

`dynamic` has 256 values whose spacing grows with their size, signed or not (8-bit optimizers, arXiv 2110.02861, section
2.2; the maps of bitsandbytes and torchao); `fp8` is float8 with 4 bits of exponent (e4m3). A block is divided by its
largest, which for fp8 is then 448, and rounded to the nearest. Rounding has no random part.

A slice of a row may begin or end inside of a block. Its part of that block has the scale of the whole block, which the
ranks that hold the other parts have agreed on: codes are those of the whole tensor, wherever it is cut.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

LEAST_SCALE = 1e-12  # of a block of zeros; torchao's
LARGEST_FP8 = 448.0
EXPONENTS = 7  # decades of the dynamic map


class Span(NamedTuple):
    """Columns of a row that a slice holds: the first of them, how many there are, and the size of blocks."""

    first: int
    size: int
    block: int

    @property
    def blocks(self) -> range:
        """Numbers of the row's blocks of which it holds some elements."""
        return range(self.first // self.block, -(-(self.first + self.size) // self.block))


def in_blocks(values: Tensor, span: Span) -> Tensor:
    """Return [..., columns] as [..., blocks, size of a block], with zeros for what the slice does not hold."""
    before = span.first % span.block
    after = -(span.first + span.size) % span.block
    padded = F.pad(values, (before, after)) if before or after else values
    return padded.unflatten(-1, (-1, span.block))


def of_blocks(values: Tensor, span: Span) -> Tensor:
    """Return the [..., columns] of which `values` are the blocks."""
    return values.flatten(-2).narrow(-1, span.first % span.block, span.size)


def largest_of_blocks(values: Tensor, span: Span) -> Tensor:
    """Return the largest absolute value of each block, as far as the slice holds it, in fp32: [..., blocks]."""
    return in_blocks(values.abs(), span).amax(-1).float()


def scales_of(largest: Tensor, form: str) -> Tensor:
    """Return the scales of blocks with these largest absolute values."""
    least = largest.clamp(min=LEAST_SCALE)
    return least.div_(LARGEST_FP8) if form == "fp8" else least


def codes_of(values: Tensor, scales: Tensor, span: Span, form: str, signed: bool) -> Tensor:
    """Return the codes of [..., columns], uint8 of the same shape; `scales` are [..., blocks]."""
    parts = of_blocks(in_blocks(values, span) / scales.unsqueeze(-1), span)
    if form == "fp8":
        return parts.float().clamp_(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn).view(torch.uint8)
    if parts.dtype == torch.float32:
        return _encode_by_bits(parts.contiguous(), signed)
    borders = dynamic_map(signed, values.device)[1]
    return torch.bucketize(parts.contiguous(), borders.to(parts.dtype), out_int32=True, right=True).to(torch.uint8)


def decode(codes: Tensor, scales: Tensor, span: Span, form: str, signed: bool, dtype: torch.dtype) -> Tensor:
    """Return the numbers [..., columns] that codes stand for, in `dtype`."""
    if form == "fp8":
        parts = codes.view(torch.float8_e4m3fn).to(dtype)
    else:
        table = dynamic_map(signed, codes.device)[0].to(dtype)
        parts = table.index_select(0, codes.flatten().int()).view(codes.shape)
    return of_blocks(in_blocks(parts, span) * scales.to(dtype).unsqueeze(-1), span)


def make_tables(device: torch.device) -> None:
    """Make what the dynamic map looks up on a device, which takes copies from the host: ahead of the first step."""
    for signed in (True, False):
        dynamic_map(signed, device)
        codes_by_bits(signed, device)


@cache
def dynamic_map(signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the 256 values of the dynamic map, ascending in fp32, and the 255 borders between them.

    A number on a border belongs to the greater value.
    """
    values = torch.tensor(_dynamic_values(signed), dtype=torch.float32)
    borders = (values[1:] + values[:-1]) / 2
    return values.to(device), borders.to(device)


def _encode_by_bits(parts: Tensor, signed: bool) -> Tensor:
    """Return the codes of fp32 numbers as a search among the borders does, which on a CPU takes ten times as long."""
    least, border = codes_by_bits(signed, parts.device)
    upper = (parts.view(torch.int32) >> 16).bitwise_and_(0xFFFF).flatten()
    is_above = parts.flatten() >= border.index_select(0, upper)
    return least.index_select(0, upper).add_(is_above).view(parts.shape)


@cache
def codes_by_bits(signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return by the upper 16 bits of fp32 numbers the least code of those that have them, and the border among them.

    Numbers with equal upper bits are within 1/128 of each other, which is less than borders are apart: there is one at
    most, and infinity stands for none.
    """
    bits = torch.arange(1 << 16, dtype=torch.int32) << 16
    ends = torch.stack([bits, bits | 0xFFFF]).view(torch.float32).nan_to_num(1.0)
    borders = dynamic_map(signed, torch.device("cpu"))[1]
    least, most = (torch.bucketize(end, borders, right=True) for end in (ends.amin(0), ends.amax(0)))
    border = torch.where(most > least, borders[least.clamp(max=254)], torch.inf)
    return least.to(device, torch.uint8), border.to(device)


def _dynamic_values(signed: bool) -> list[float]:
    """Each decade below 1 has twice the values of the one before: means of even intervals from a tenth of it to it."""
    values = [0.0, 1.0]
    for exponent in range(EXPONENTS):
        count = 2**exponent if signed else 2 ** (exponent + 1)
        decade = 10.0 ** (exponent - EXPONENTS + 1)
        means = [decade * (0.1 + 0.9 * (index + 0.5) / count) for index in range(count)]
        values += [*means, *(-mean for mean in means)] if signed else means
    return sorted(values)
