"""Tensors inside of nested containers: mapped, listed, moved to a device, and sent from one rank to others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Return `value` with `function` applied to everything in its lists, tuples, sets and mappings.

    Containers keep their classes, Hugging Face outputs too.
    """
    if isinstance(value, Mapping):
        return mapping_like(value, {key: map_leaves(function, item) for key, item in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_leaves(function, item) for item in value))
    if isinstance(value, (list, tuple, set)):
        return type(value)(map_leaves(function, item) for item in value)
    return function(value)


def tree_leaves(value: Any) -> list[Any]:
    """List everything in the containers of `value`."""
    leaves: list[Any] = []
    map_leaves(lambda leaf: leaves.append(leaf), value if not isinstance(value, set) else list(value))
    return leaves


def nested_tensors(value: Any) -> list[Tensor]:
    """List the tensors in the containers of `value`."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def mapping_like(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return `items` in the class of `mapping`."""
    if type(mapping) is dict:
        return items
    try:
        return type(mapping)(**items)  # transformers' outputs
    except TypeError:
        return type(mapping)(items)  # type: ignore[call-arg]


def to_device(value: Any, device: torch.device) -> Any:
    """Return `value` with its tensors on `device`."""
    return map_leaves(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, value)


@dataclass(frozen=True)
class _SentTensor:
    """Placeholder of a tensor while the rest of its container is sent."""

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def broadcast_nested(value: Any, source: int, group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return what rank `source` of the job has, on all ranks of `group`. Collective.

    The `value` of other ranks is not looked at.
    """
    tensors: list[Tensor] = []
    is_source = dist.get_rank() == source

    def without_tensor(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        tensors.append(leaf.detach())
        return _SentTensor(len(tensors) - 1, tuple(leaf.shape), leaf.dtype)

    sent = [map_leaves(without_tensor, value) if is_source else None]
    dist.broadcast_object_list(sent, source, group=group, device=torch.device("cpu"))

    def with_tensor(leaf: Any) -> Any:
        if not isinstance(leaf, _SentTensor):
            return leaf
        empty = torch.empty(leaf.shape, dtype=leaf.dtype, device=device)
        tensor = tensors[leaf.index].to(device).contiguous() if is_source else empty
        dist.broadcast(tensor, source, group=group)
        return tensor

    return map_leaves(with_tensor, sent[0])
