"""Means of tracing: fake tensors, dispatch modes, trees of arguments."""

from __future__ import annotations

from torch import Tensor

# No public name: torch documents FakeTensorMode only under its private module (torch 2.11 to 2.13).
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

# No public name: torch documents TorchDispatchMode only under its private module (torch 2.11 to 2.13).
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

# Waits for torch.utils.pytree, which does not exist in torch 2.13.
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = [
    "FakeTensorMode",
    "TorchDispatchMode",
    "is_fake",
    "is_traceable_wrapper_subclass",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
]


def is_fake(tensor: Tensor) -> bool:
    """Return whether a tensor has no storage: one of a dry run, whose attributes are torch's own."""
    return isinstance(tensor, FakeTensor)
