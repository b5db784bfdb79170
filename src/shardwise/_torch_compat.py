"""The only place that imports private torch modules; each import says which public name it waits for."""

from __future__ import annotations

from collections.abc import Callable

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

__all__ = [
    "FakeTensorMode",
    "TorchDispatchMode",
    "clear_placement_cache",
    "is_traceable_wrapper_subclass",
    "tree_flatten",
    "tree_leaves",
]
