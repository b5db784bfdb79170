"""Stands for apex's extensions `amp_C` and `apex_C`: the same numbers, by torch's operations on lists of tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def multi_tensor_scale(chunk_size: int, overflow: Tensor, lists: Sequence[Sequence[Tensor]], scale: float) -> None:
    """Set the second of two lists to the first times `scale`; set `overflow` where that is not finite."""
    for source, target in zip(*lists):
        target.copy_(source.float() * scale)
        if not bool(torch.isfinite(target).all()):
            overflow.fill_(1)


def multi_tensor_l2norm(
    chunk_size: int, overflow: Tensor, lists: Sequence[Sequence[Tensor]], per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """([1] L2 norm of all elements of the first list, the norms of its tensors, or nothing)."""
    norms = torch.stack(torch._foreach_norm([tensor.float() for tensor in lists[0]]))
    return norms.norm().reshape(1), norms if per_tensor else norms.new_empty(0)


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """[elements of all `tensors`]."""
    return torch.cat([tensor.flatten() for tensor in tensors])


def unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Views of `flat` of the shapes of `tensors`."""
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors)]
