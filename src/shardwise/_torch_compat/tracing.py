"""Means of tracing: fake tensors, dispatch modes, trees of arguments."""

from __future__ import annotations

from functools import cache

import torch
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
    "attributes_of_fakes",
    "is_fake",
    "is_traceable_wrapper_subclass",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
]


@cache
def attributes_of_fakes() -> frozenset[str]:
    """Return the names of the attributes that torch sets on fake tensors."""
    with FakeTensorMode():
        return frozenset(vars(torch.empty(0))) | {"_is_param"}


def is_fake(tensor: Tensor) -> bool:
    """Return whether a tensor has no storage: one of a dry run, whose attributes are torch's own."""
    return isinstance(tensor, FakeTensor)
