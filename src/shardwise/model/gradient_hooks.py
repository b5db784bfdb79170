"""Finds the hooks on a model's parameters, and tells which of them may be given a gradient in parts.

A hook of `Tensor.register_hook` that scales or masks is additive: what it returns for a sum is the sum of what it
returns for the parts. One that clips, normalises or adds is not, and has to be given the whole gradient at once.
"""

from __future__ import annotations

import inspect
import linecache
import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardwise._torch_compat.autograd import accumulate_grad_hooks, gradient_hooks

GradientHook = Callable[[Tensor], Tensor | None]
LARGEST_TRIAL = 2**24  # elements; a hook on more of them is not tried
TOLERANCE = 1e-12


def find_gradient_hooks(model: nn.Module) -> dict[str, tuple[GradientHook, ...]]:
    """Return the hooks of `Tensor.register_hook` by name of the parameter that has some."""
    named = ((name, tuple(gradient_hooks(parameter).values())) for name, parameter in model.named_parameters())
    return {name: hooks for name, hooks in named if hooks}


def find_accumulate_grad_hooks(model: nn.Module) -> tuple[str, ...]:
    """Return the names of parameters with a hook of `register_post_accumulate_grad_hook`."""
    return tuple(name for name, parameter in model.named_parameters() if accumulate_grad_hooks(parameter))


def call_hooks(hooks: tuple[GradientHook, ...], gradient: Tensor) -> Tensor:
    """Return what autograd would make of `gradient` with these hooks."""
    for hook in hooks:
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient


def whole_gradient_hooks(model: nn.Module, hooks: Mapping[str, tuple[GradientHook, ...]]) -> tuple[str, ...]:
    """Return the parameters whose hooks need the whole gradient at once: the trial shows that they are not additive."""
    return tuple(name for name, of_one in hooks.items() if not _is_additive(of_one, model.get_parameter(name).shape))


def _is_additive(hooks: tuple[GradientHook, ...], shape: torch.Size) -> bool:
    if shape.numel() > LARGEST_TRIAL:
        return False
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randn(shape, dtype=torch.float64, generator=generator) * scale for scale in (1.0, 1e3))
    try:
        parts = call_hooks(hooks, one.clone()) + call_hooks(hooks, other.clone())
        whole = call_hooks(hooks, one + other)
        return bool(torch.allclose(parts, whole, rtol=TOLERANCE, atol=TOLERANCE))
    except Exception:  # the user's code, which may need more than a gradient
        return False


def definition_of(module: nn.Module) -> str:
    """Return the name of a module's class with the file and line where it is defined, as far as they are known."""
    definition = next(base for base in type(module).__mro__ if not issubclass(base, FSDPModule))
    try:
        return f"{definition.__name__} ({inspect.getsourcefile(definition)}:{_line_of(definition)})"
    except (OSError, TypeError):
        return definition.__name__


def _line_of(definition: type) -> int:
    """Return the line of a class in its file; parsing, as `inspect` does, is for names that are there twice."""
    start = re.compile(rf"\s*class {definition.__name__}\b")
    lines = linecache.getlines(inspect.getsourcefile(definition) or "")
    matching = [number for number, line in enumerate(lines, 1) if start.match(line)]
    return matching[0] if len(matching) == 1 else inspect.getsourcelines(definition)[1]
