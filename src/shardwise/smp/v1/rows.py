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
from shardwise.smp.v1.nesting import map_leaves
from shardwise.smp.v1.process import state


def merge(inputs: dict[str, Any]) -> dict[str, Any]:
    """The tensors [B, ...] of `inputs`, of all tensor ranks: [t*B, ...]. Collective over them."""
    if state.layout.size(Axis.TENSOR) == 1:
        return inputs
    return {name: map_leaves(_merge, value) for name, value in inputs.items()}


def _merge(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or leaf.dim() == 0:
        return leaf
    parts = [torch.empty_like(leaf) for _ in range(state.layout.size(Axis.TENSOR))]
    dist.all_gather(parts, leaf.contiguous(), group=state.layout.group(Axis.TENSOR))
    return torch.cat(parts)


def narrow(output: Any, rows: int) -> Any:
    """This rank's `rows` of every tensor [t*B, ...] of the model's output; scalars as they are."""

    def cut(leaf: Any) -> Any:
        return _OwnRows.apply(leaf, rows) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return map_leaves(cut, output)


class _OwnRows(torch.autograd.Function):
    """[t*B, ...] -> [B, ...]; a scalar stays. Backward sums over the tensor ranks, each of which has used its own."""

    @staticmethod
    def forward(context: Any, values: Tensor, rows: int) -> Tensor:
        context.shape = values.shape
        if values.dim() == 0 or values.shape[0] != rows * state.layout.size(Axis.TENSOR):
            context.first = None
            return values.clone()
        context.first = state.layout.index(Axis.TENSOR) * rows
        return values[context.first : context.first + rows].clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        whole = gradient.new_zeros(context.shape)
        if context.first is None:
            whole = gradient.clone()
        else:
            whole[context.first : context.first + gradient.shape[0]] = gradient
        dist.all_reduce(whole, group=state.layout.group(Axis.TENSOR))
        return whole, None
