"""The only place that imports private torch modules; each import says which public name it waits for."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

# No public name: torch documents FakeTensorMode only under its private module (torch 2.11 to 2.13).
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import debug

# No public name: torch documents TorchDispatchMode only under its private module (torch 2.11 to 2.13).
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

# Waits for torch.utils.pytree, which does not exist in torch 2.13.
from torch.utils._pytree import tree_flatten, tree_leaves

# No public name: DTensor's cache of output placements keeps the meshes of process groups that are gone. A torch without
# this function (it may be absent from 2.11) has no second group in one process, which only tests make.
clear_placement_cache: Callable[[], None] = getattr(debug, "_clear_sharding_prop_cache", lambda: None)

# Public names, but torch 2.13 warns of the older ones.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_ATEN = torch.ops.aten


def has_flash_attention(query: Tensor) -> bool:
    """Whether the fused kernel that also gives the log-sum-exp runs on these tensors [B, h, S, d]."""
    return query.device.type == "cpu"


# No public name: scaled_dot_product_attention keeps the log-sum-exp to itself (torch 2.11 to 2.13).
def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(output [B, h, Q, d], log-sum-exp [B, h, Q]) of torch's fused attention on a CPU; `mask` is added to scores."""
    output, logs = _ATEN._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=mask, scale=scale
    )
    return output, logs


def flash_attention_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    scale: float,
    gradient: Tensor,
    output: Tensor,
    logs: Tensor,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value for a given output, its gradient and log-sum-exp."""
    grads: tuple[Tensor, Tensor, Tensor] = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, query, key, value, output, logs, 0.0, causal, attn_mask=mask, scale=scale
    )
    return grads


__all__ = [
    "FakeTensorMode",
    "TorchDispatchMode",
    "all_gather_single",
    "clear_placement_cache",
    "flash_attention",
    "flash_attention_backward",
    "has_flash_attention",
    "is_traceable_wrapper_subclass",
    "reduce_scatter_single",
    "tree_flatten",
    "tree_leaves",
]
