"""AdamW with moments in codes of one byte and a scale for each block: 8 bits of a dynamic map, or float8.

A moment is decoded, moved by the gradient, used for the update as it then is, and encoded again. Blocks are those of
the whole tensor. Where tensor parallelism cuts a row inside of a block, the ranks that hold its parts first agree on
its largest value, in one all-reduce of all such blocks, so that codes and scales are the same bits on every layout.
Small tensors and vectors keep their moments as they are (`is_quantized`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.collectives.tensor import largest_together
from shardwise.job.optimizer_records import BLOCK, is_quantized
from shardwise.kernels.block_codes import (
    Span,
    codes_of,
    decode,
    largest_of_blocks,
    make_tables,
    scales_of,
)
from shardwise.parallel.logical_state import StateForm
from shardwise.parallel.tensor_map import ParameterEntry, Region
from shardwise.training.optimizers.adamw import AdamWStep, adamw_update, next_moments
from shardwise.training.optimizers.checks import check_betas, check_rates
from shardwise.training.optimizers.slice_optimizer import SliceOptimizer, chunks_of

MOMENTS = (("exp_avg", True), ("exp_avg_sq", False))  # names, and whether they have a sign


@dataclass(frozen=True)
class Piece:
    """Neighbouring columns of the whole tensor that lie side by side in the local one.

    Attributes:
        columns: where they lie in the local tensor.
        span: which of the whole row they are.
        scales: where the scales of their blocks lie in the local scales.
    """

    columns: slice
    span: Span
    scales: slice

    def within(self, block: int) -> Piece:
        """Return what of the piece lies in a block of the whole row."""
        first = max(self.span.first, block * self.span.block)
        last = min(self.span.first + self.span.size, (block + 1) * self.span.block)
        shift, scale = self.columns.start - self.span.first, self.scales.start + block - self.span.blocks.start
        span = Span(first, last - first, self.span.block)
        return Piece(slice(first + shift, last + shift), span, slice(scale, scale + 1))


@dataclass(frozen=True)
class Blocks:
    """The blocks of a local tensor: its pieces, and which blocks of a row it shares with other ranks."""

    pieces: tuple[Piece, ...]
    cut: tuple[int, ...]

    @classmethod
    def of(cls, entry: ParameterEntry, block: int) -> Blocks:
        """Return the blocks of a rank's part of a tensor."""
        columns = dict.fromkeys((r.local[-1].start, r.logical[-1].start, r.logical[-1].stop) for r in entry.regions)
        pieces: list[Piece] = []
        scales = 0
        for local, first, last in sorted(columns):
            if last > first:
                span = Span(first, last - first, block)
                pieces.append(Piece(slice(local, local + span.size), span, slice(scales, scales + len(span.blocks))))
                scales += len(span.blocks)
        return cls(tuple(pieces), tuple(_cut_blocks(entry, block)))

    @property
    def scales(self) -> int:
        """Scales beside a row of the local tensor."""
        return self.pieces[-1].scales.stop if self.pieces else 0


class BlockwiseAdamW(SliceOptimizer):
    """AdamW with moments in codes; the class says in which form."""

    form = ""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        block_size: int = BLOCK,
    ) -> None:
        check_rates(lr, weight_decay, eps)
        if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
            raise ValueError(f"Invalid block_size: {block_size}; a whole number from 1 on")
        self.block = block_size
        settings = {"lr": lr, "betas": check_betas(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, settings | {"block_size": block_size})
        if self.form == "dynamic":
            for device in {parameter.device for group in self.param_groups for parameter in group["params"]}:
                make_tables(device)

    def step(self, closure: Any = None) -> Any:
        """Update every parameter that has a gradient; scales of blocks that are cut are agreed on first."""
        with torch.no_grad():
            for _, parameter in self.updates():
                self.state_of(parameter)["step"] += 1
            agreed = self._agree()
            for group, parameter in self.updates():
                at = AdamWStep.of(group, self.state[parameter]["step"])
                if is_quantized(self.entry(parameter).shape):
                    self._update_codes(at, parameter, agreed.get(parameter))
                else:
                    self._update_plain(at, parameter)

    def forms(self, parameter: nn.Parameter) -> Mapping[str, StateForm]:
        """Return codes in the slices of the parameter, and scales in those of the blocks."""
        entry, kept = self.entry(parameter), self.kept(parameter)
        forms = dict(super().forms(parameter))
        if is_quantized(entry.shape):
            for key, _ in MOMENTS:
                forms[f"{key}_scale"] = self._form_of_scales(entry, kept[f"{key}_scale"].shape)
        return forms

    def _form_of_scales(self, entry: ParameterEntry, shape: tuple[int, ...]) -> StateForm:
        """Return which scales are here; those of a block that several ranks hold are written with its first element."""
        blocks = Blocks.of(entry, self.block)
        regions, owned = [], []
        for piece in blocks.pieces:
            numbers, first = piece.span.blocks, -(-piece.span.first // self.block)
            for region in entry.regions:
                if region.local[-1].start == piece.columns.start:
                    regions.append(_with_last(region, numbers, piece.scales.start))
                    own = range(first, numbers.stop)
                    owned.append(_with_last(region, own, piece.scales.start + first - numbers.start))
        local = (*entry.local.shape[:-1], blocks.scales)
        return StateForm(shape, torch.float32, local, tuple(regions), tuple(owned))

    def _agree(self) -> dict[nn.Parameter, Tensor]:
        """Return the largest values of blocks that ranks share, [moments, ..., cut blocks] by parameter. Collective."""
        largest: dict[nn.Parameter, Tensor] = {}
        sharing: dict[dist.ProcessGroup, list[Tensor]] = {}
        for group, parameter in self.updates():
            entry = self.entry(parameter)
            if is_quantized(entry.shape) and (blocks := Blocks.of(entry, self.block)).cut:
                assert entry.split_group is not None
                at = AdamWStep.of(group, self.state[parameter]["step"])
                largest[parameter] = self._own_largest(at, parameter, blocks)
                sharing.setdefault(entry.split_group, []).append(largest[parameter])
        for ranks, values in sharing.items():
            largest_together(values, ranks, self.device, "scales of cut blocks")
        return largest

    def _own_largest(self, at: AdamWStep, parameter: nn.Parameter, blocks: Blocks) -> Tensor:
        """Return the largest of the next moments of cut blocks, as far as they are here."""
        largest = torch.zeros(len(MOMENTS), *parameter.shape[:-1], len(blocks.cut), device=parameter.device)
        for piece in blocks.pieces:
            for index, number in enumerate(blocks.cut):
                if number in piece.span.blocks:
                    part = piece.within(number)
                    _, *views = self._views(parameter, part)
                    for kept, moment in zip(largest, self._next(at, part.span, *views), strict=True):
                        own = largest_of_blocks(moment, part.span)[..., 0]
                        torch.maximum(kept[..., index], own, out=kept[..., index])
        return largest

    def _update_codes(self, at: AdamWStep, parameter: nn.Parameter, agreed: Tensor | None) -> None:
        """Update a parameter and the codes of its moments."""
        blocks = Blocks.of(self.entry(parameter), self.block)
        for piece in blocks.pieces:
            views = self._views(parameter, piece)
            shared = [(piece.span.blocks.index(n), i) for i, n in enumerate(blocks.cut) if n in piece.span.blocks]
            for weight, *kept in chunks_of([*views, *([] if agreed is None else agreed)]):
                gradient, codes, scales, common = kept[0], kept[1:3], kept[3:5], kept[5:]
                moments = self._next(at, piece.span, gradient, *codes, *scales)
                for index, (_, signed) in enumerate(MOMENTS):
                    largest = largest_of_blocks(moments[index], piece.span)
                    for place, number in shared:
                        largest[..., place] = common[index][..., number]
                    scales[index].copy_(scales_of(largest, self.form))
                    wide = scales[index].to(weight.dtype)
                    codes[index].copy_(codes_of(moments[index], wide, piece.span, self.form, signed))
                adamw_update(at, weight, *moments)

    def _next(
        self, at: AdamWStep, span: Span, gradient: Tensor, first: Tensor, second: Tensor, *scales: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return both moments after a gradient, from their codes and scales, in the gradient's dtype."""
        before = [
            decode(codes, scale, span, self.form, signed, gradient.dtype)
            for codes, scale, (_, signed) in zip((first, second), scales, MOMENTS, strict=True)
        ]
        return next_moments(at, gradient, before[0], before[1])

    def _views(self, parameter: nn.Parameter, piece: Piece) -> list[Tensor]:
        """Return weights, gradients, codes and scales of a piece."""
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        alike = [parameter, gradient, *(state[key] for key, _ in MOMENTS)]
        scales = [state[f"{key}_scale"][..., piece.scales] for key, _ in MOMENTS]
        return [*(tensor[..., piece.columns] for tensor in alike), *scales]

    def _update_plain(self, at: AdamWStep, parameter: nn.Parameter) -> None:
        """Update a parameter whose moments are kept as they are."""
        assert parameter.grad is not None
        state = self.state[parameter]
        tensors = [parameter, parameter.grad, *(state[key] for key, _ in MOMENTS)]
        for weight, gradient, first, second in chunks_of(tensors):
            moments = next_moments(at, gradient, first, second)
            first.copy_(moments[0])
            second.copy_(moments[1])
            adamw_update(at, weight, *moments)


class AdamW8bit(BlockwiseAdamW):
    """AdamW with moments in 8 bits of the dynamic map."""

    form = "dynamic"


class AdamWFp8(BlockwiseAdamW):
    """AdamW with moments in float8 (e4m3)."""

    form = "fp8"


def _cut_blocks(entry: ParameterEntry, block: int) -> list[int]:
    """Return the blocks of a row of which several ranks hold parts."""
    split, columns = entry.split, entry.shape[-1]
    if split is None or split.dim != len(entry.shape) - 1:
        return []
    regions = [region.logical[-1] for index in range(split.degree) for region in split.regions(index)]
    borders = {border for part in regions if part.stop > part.start for border in (part.start, part.stop)}
    return sorted({border // block for border in borders if border % block and border != columns})


def _with_last(region: Region, numbers: range, start: int) -> Region:
    """Return a region with these numbers along the last dim of the logical tensor, and as many from `start` locally."""
    count = len(numbers)
    logical, local = slice(numbers.start, numbers.start + count), slice(start, start + count)
    return Region((*region.logical[:-1], logical), (*region.local[:-1], local))
