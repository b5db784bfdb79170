"""Means of tracing: fake tensors, dispatch modes, trees of arguments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

# No public name: torch documents FakeTensorMode only under its private module (torch 2.11 to 2.13).
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

# No public names: torch documents dispatch modes only under its private module (torch 2.11 to 2.14).
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode,
    _pop_mode_temporarily,
    is_traceable_wrapper_subclass,
)
from torch.utils._python_dispatch import _disable_current_modes as dispatch_modes_off

# Waits for torch.utils.pytree, which does not exist in torch 2.13.
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = [
    "DataDependentOutputException",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "asks_for_values",
    "attributes_of_fakes",
    "dispatch_modes_off",
    "is_fake",
    "is_traceable_wrapper_subclass",
    "latest_mode",
    "latest_mode_off",
    "runs_backward",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
    "without_stack_traces",
]

# Text of what has no class of its own: `numpy()` of fake tensors, `item()` and copies of those on the meta device.
_ASKS_FOR_VALUES = (
    "not supported for tensor subclasses",
    "cannot be called on meta tensors",
    "copy out of meta tensor",
)


def asks_for_values(error: BaseException) -> bool:
    """Return whether torch has no answer, since it would follow from values that fake tensors do not have."""
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        return True
    is_guard = type(error).__name__ == "GuardOnDataDependentSymNode"  # its module imports sympy
    return is_guard or any(text in str(error) for text in _ASKS_FOR_VALUES)


@cache
def attributes_of_fakes() -> frozenset[str]:
    """Return the names of the attributes that torch sets on fake tensors."""
    with FakeTensorMode():
        return frozenset(vars(torch.empty(0))) | {"_is_param"}


def is_fake(tensor: Tensor) -> bool:
    """Return whether a tensor has no storage: one of a traced job, whose attributes are torch's own."""
    return isinstance(tensor, FakeTensor)


def latest_mode() -> Any:
    """Return the dispatch mode that was entered last; None without one."""
    return _get_current_dispatch_mode()


def latest_mode_off() -> AbstractContextManager[Any]:
    """Set that mode aside inside."""
    return _pop_mode_temporarily()


def runs_backward() -> bool:
    """Return whether autograd's backward is what runs now, recomputed forwards included."""
    # No public name: torch's own hooks of multi-tensor gradients ask it (torch 2.11 to 2.13).
    return bool(torch._C._current_graph_task_id() != -1)


@contextmanager
def without_stack_traces() -> Iterator[None]:
    """Let torch not note the lines of operators that it traces, which took a tenth of a trace (torch 2.13)."""
    config: Any = torch.fx.config  # which has no such setting in torch 2.11
    before = getattr(config, "do_not_emit_stack_traces", False)
    config.do_not_emit_stack_traces = True
    try:
        yield
    finally:
        config.do_not_emit_stack_traces = before
