"""The only place that imports private torch modules; each import says which public name it waits for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import distributed

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

# Public, and renamed: torch 2.13 warns of the names that 2.11 has.
all_gather_single: Callable[..., Any] = getattr(distributed, "all_gather_single", distributed.all_gather_into_tensor)
reduce_scatter_single: Callable[..., Any] = getattr(
    distributed, "reduce_scatter_single", distributed.reduce_scatter_tensor
)

__all__ = [
    "FakeTensorMode",
    "TorchDispatchMode",
    "all_gather_single",
    "clear_placement_cache",
    "is_traceable_wrapper_subclass",
    "reduce_scatter_single",
    "tree_flatten",
    "tree_leaves",
]
