"""Batches of tensor ranks that each read their own: merged before the model, and taken apart after it.

SMP's tensor parallelism runs across data-parallel ranks (`prescaled_batch` off): the ranks of a tensor group compute on
all of their rows together. Backward, what each rank made of its own rows is put together again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.job.axes import Axis
from shardwise.parallel.layout import Layout
from shardwise.smp.nesting import map_leaves


def merge_rows(inputs: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """Return `inputs` with the rows of all tensor ranks: tensors [B, ...] as [t*B, ...]. Collective over them."""
    degree = layout.size(Axis.TENSOR)
    if degree == 1:
        return inputs

    def merged(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() == 0:
            return leaf
        parts = [torch.empty_like(leaf) for _ in range(degree)]
        dist.all_gather(parts, leaf.contiguous(), group=layout.group(Axis.TENSOR))
        return torch.cat(parts)

    return {name: map_leaves(merged, value) for name, value in inputs.items()}


def narrow_rows(output: Any, rows: int, layout: Layout) -> Any:
    """Return this rank's `rows` of every tensor [t*B, ...] of the model's output; scalars as they are."""

    def cut(leaf: Any) -> Any:
        is_cut = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return _OwnRows.apply(leaf, rows, layout) if is_cut else leaf

    return map_leaves(cut, output)


class _OwnRows(torch.autograd.Function):
    """[t*B, ...] -> [B, ...]; a scalar stays. Backward sums over the tensor ranks, each of which has used its own."""

    @staticmethod
    def forward(context: Any, values: Tensor, rows: int, layout: Layout) -> Tensor:
        context.shape, context.group = values.shape, layout.group(Axis.TENSOR)
        if values.dim() == 0 or values.shape[0] != rows * layout.size(Axis.TENSOR):
            context.first = None
            return values.clone()
        context.first = layout.index(Axis.TENSOR) * rows
        return values[context.first : context.first + rows].clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        whole = gradient.new_zeros(context.shape)
        if context.first is None:
            whole = gradient.clone()
        else:
            whole[context.first : context.first + gradient.shape[0]] = gradient
        dist.all_reduce(whole, group=context.group)
        return whole, None, None
