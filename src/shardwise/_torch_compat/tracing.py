"""Means of tracing: fake tensors, dispatch modes, trees of arguments."""

from __future__ import annotations

# No public name: torch documents FakeTensorMode only under its private module (torch 2.11 to 2.13).
from torch._subclasses.fake_tensor import FakeTensorMode

# No public name: torch documents TorchDispatchMode only under its private module (torch 2.11 to 2.13).
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

# Waits for torch.utils.pytree, which does not exist in torch 2.13.
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

__all__ = [
    "FakeTensorMode",
    "TorchDispatchMode",
    "is_traceable_wrapper_subclass",
    "tree_flatten",
    "tree_leaves",
    "tree_unflatten",
]
