"""Tables of `nn.Module` that have no public name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.modules._functions import BackwardHookFunction  # no public name (torch 2.11 to 2.14)


def clear_module_hooks(module: nn.Module) -> None:
    """Take off the hooks that a call of `module` calls."""
    for hooks in hook_tables(module):
        hooks.clear()


def hook_tables(module: nn.Module) -> tuple[dict[int, Any], ...]:
    """Return the tables of hooks that a call of `module`, or its backward, calls."""
    return module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module is what `torch.compile` has made of another."""
    return "_orig_mod" in module._modules  # its class would have to be imported, which takes seconds


def is_backward_hook(function: type[Function]) -> bool:
    """Return whether an autograd function is the one by which torch calls backward hooks of modules."""
    return issubclass(function, BackwardHookFunction)


def copy_module(module: nn.Module) -> nn.Module:
    """Return a shallow copy of a module that has tables of its own parameters and buffers."""
    copied = copy.copy(module)
    copied._parameters, copied._buffers = dict(module._parameters), dict(module._buffers)
    return copied


@contextmanager
def replaced_parameters(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Let attributes of a module that are parameters of its own be `tensors` inside; autograd goes through these.

    Waits for a `torch.func.functional_call` of a method: that of a module runs its hooks.
    """
    own = {leaf: module._parameters[leaf] for leaf in tensors}
    module._parameters.update(tensors)  # type: ignore[arg-type]
    try:
        yield
    finally:
        module._parameters.update(own)


def is_persistent(module: nn.Module, buffer: str) -> bool:
    """Return True if a module's own buffer belongs to its state dict."""
    return buffer not in module._non_persistent_buffers_set


def load_hooks(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """Return the hooks that run when a state dict was loaded, by key; removing one here removes it from the module."""
    return module._load_state_dict_post_hooks


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers that belong to a state dict, once each."""
    counted: set[int] = set()
    for prefix, part in module.named_modules():
        for name, buffer in part.named_buffers(recurse=False, remove_duplicate=False):
            if not is_persistent(part, name) or id(buffer) in counted:
                continue
            counted.add(id(buffer))
            yield f"{prefix}.{name}".lstrip("."), buffer
