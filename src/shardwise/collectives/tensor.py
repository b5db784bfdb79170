"""The autograd collectives of tensor parallelism (Megatron-LM, arXiv 1909.08053, figure 3: f and g).

A region of split modules is entered with whole activations and left with a sum of partial ones; what is the identity in
one direction is an all-reduce in the other.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return summed(gradients[0], ctx.group), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        return summed(values, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def enter(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`values`, equal on all ranks of `group`; their gradient is the sum of the ranks' gradients."""
    entered: Tensor = _Enter.apply(values, group)
    return entered


def leave(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of the ranks' `values`; the gradient of each is that of the sum."""
    left: Tensor = _Leave.apply(values, group)
    return left


def summed(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """A new tensor: the sum over `group`. Without autograd."""
    total = values.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total
