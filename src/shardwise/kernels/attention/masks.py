"""Masks of attention as functions of positions, made for the block that is computed, whole for nobody.

A `Mask` holds transformers' own mask functions (causal, windows, chunks, padding) or those made here, together with the
positions of the queries and keys at hand. Which blocks are hidden altogether and which not at all is found out once
and shared by all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

# (batch [B,1,1,1], head [1,1,1,1], query positions [1,1,Q,1], key positions [1,1,1,K]) -> bool, broadcast; True: seen.
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
BLOCK = 512  # queries and keys of a block


class MaskBlock(NamedTuple):
    """A block of the square of queries and keys that is not hidden; `whole`: nothing of it is."""

    rows: slice
    columns: slice
    whole: bool


class Mask:
    """The keys that each query sees.

    Args:
        function: says it for positions.
        rows, columns: [Q] and [K] positions of queries and keys.
        batch: rows of the batch.
        causal: known to hide just the keys ahead, for queries and keys at the same positions.
    """

    ndim = 0  # models that add to a mask of four dims on their own (Falcon) find none

    def __init__(self, function: MaskFunction, rows: Tensor, columns: Tensor, batch: int, causal: bool = False) -> None:
        self.function, self.rows, self.columns, self.batch, self.causal = function, rows, columns, batch, causal

    def block(self, rows: slice | Tensor, columns: slice | Tensor) -> Tensor:
        """Return [1 or B, 1, Q, K] bool of some queries and keys by their index."""
        return self.at(self.rows[rows], self.columns[columns])

    def at(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Return [1 or B, 1, Q, K] bool of queries and keys by their positions."""
        batch = torch.arange(self.batch, device=rows.device).view(-1, 1, 1, 1)
        visible = self.function(batch, batch.new_zeros(1, 1, 1, 1), rows.view(1, 1, -1, 1), columns.view(1, 1, 1, -1))
        return visible.expand(-1, -1, len(rows), len(columns))

    def within(self, window: int) -> Mask:
        """Return the same mask, with keys hidden that are `window` or more back."""

        def function(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return self.function(b, h, q, k) & (k > q - window)

        return Mask(function, self.rows, self.columns, self.batch)

    @cached_property
    def dense(self) -> Tensor:
        """[1 or B, 1, Q, K] bool, for kernels that take masks whole."""
        return self.block(slice(None), slice(None))

    def as_additive(self, dtype: torch.dtype) -> Tensor:
        """Return the whole mask as numbers to add: one tensor for all layers."""
        if self._additive is None or self._additive.dtype != dtype:
            self._additive = to_additive_mask(self.block(slice(None), slice(None)), dtype)
        return self._additive

    _additive: Tensor | None = None

    @cached_property
    def visible_blocks(self) -> Sequence[MaskBlock]:
        """Blocks that are not hidden; neighbours that are seen whole are one."""
        visible: list[MaskBlock] = []
        for rows in block_slices(len(self.rows)):
            cuts = block_slices(len(self.columns))
            blocks = [self.block(rows, columns) for columns in cuts]
            verdicts = torch.stack([torch.stack([block.any(), block.all()]) for block in blocks]).tolist()
            for columns, (some, all_) in zip(cuts, verdicts, strict=True):
                last = visible[-1] if visible else None
                if all_ and last and last.whole and last.rows == rows and last.columns.stop == columns.start:
                    visible[-1] = MaskBlock(rows, slice(last.columns.start, columns.stop), True)
                elif some:
                    visible.append(MaskBlock(rows, columns, bool(all_)))
        return visible


def block_slices(length: int) -> list[slice]:
    """Return slices of `length` in blocks."""
    return [slice(start, min(start + BLOCK, length)) for start in range(0, length, BLOCK)]


def make_mask(
    batch: int,
    positions: Tensor,
    *,
    causal: bool,
    padding: Tensor | None = None,
    documents: Tensor | None = None,
    window: int | None = None,
) -> Mask:
    """Return the mask of self-attention on whole sequences.

    Args:
        batch: rows of the batch.
        positions: [S] of queries and keys.
        causal: later keys are hidden.
        padding: [B, S] bool, False: hidden from all.
        documents: [B, S] number of each position's document; others' are hidden.
        window: keys that a query sees, itself the last; without `causal` as many to the other side.
    """

    def function(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        visible = (k <= q) if causal else torch.ones_like(k <= q)
        if window is not None:
            visible = visible & (k > q - window) & (k < q + window)
        if padding is not None:
            visible = visible & padding[b, k]
        return visible if documents is None else visible & same_document(documents, b, q, k)

    plain = causal and padding is None and documents is None and window is None
    return Mask(function, positions, positions, batch, plain)


def same_document(documents: Tensor, b: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Return True where query and key stand in one of the documents [B, S]."""
    return documents[b, q] == documents[b, k]


def document_mask(
    document_ids: Tensor,
    causal: bool,
    dtype: torch.dtype,
    rows: Tensor | None = None,
    columns: Tensor | None = None,
) -> Tensor:
    """Return the [B, 1, S, S] additive mask: 0 inside a document (the key not ahead), else the minimum.

    Args:
        document_ids: [B, S].
        causal: whether later keys are hidden.
        dtype: of the mask.
        rows, columns: [Q] and [K] positions of the queries and keys of a part [B, 1, Q, K]; unset: all.
    """
    everything = torch.arange(document_ids.shape[1], device=document_ids.device)
    rows = everything if rows is None else rows
    columns = everything if columns is None else columns
    allowed = document_ids[:, rows].unsqueeze(2) == document_ids[:, columns].unsqueeze(1)
    if causal:
        allowed = allowed & (columns <= rows.unsqueeze(1))
    return to_additive_mask(allowed, dtype).unsqueeze(1)


def to_additive_mask(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 0 where `allowed`, else the minimum of `dtype`, as transformers' eager attention wants it."""
    mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return mask.masked_fill_(~allowed, torch.finfo(dtype).min)
