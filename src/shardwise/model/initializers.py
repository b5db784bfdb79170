"""Runs the initializers that modules have, and tells which of them fill parameters of modules below them.

transformers' models have `_init_weights(module)`, torch's modules `reset_parameters()`. Modules of one's own have
either, or both: what `_init_weights` of the outermost module does comes after the module's own.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import cached, is_parametrized
from transformers import PreTrainedModel

from shardwise._torch_compat.tracing import TorchDispatchMode
from shardwise._torch_compat.writes import storage_key, written_tensors
from shardwise.errors import ModelError

MODEL_INITIALIZER = "_init_weights"
MODULE_INITIALIZERS = ("reset_parameters", "_reset_parameters")  # the second is torch's, in `nn.MultiheadAttention`


def run_initializer(model: nn.Module, module: nn.Module) -> None:
    """Run what fills `module`: the model's own `_init_weights`, of a user's module after its `reset_parameters`."""
    init_weights = getattr(model, MODEL_INITIALIZER, None)
    if not callable(init_weights) or not isinstance(model, PreTrainedModel):
        reset = _reset_of(module)
        if reset is not None and is_parametrized(module):
            _reset_parametrized(module, reset)
        elif reset is not None:
            reset()
    if callable(init_weights):
        init_weights(module)


def _reset_of(module: nn.Module) -> Callable[[], None] | None:
    """Return the method that fills a module, if it needs no arguments."""
    methods = (getattr(module, name, None) for name in MODULE_INITIALIZERS)
    reset: Any = next((method for method in methods if callable(method)), None)
    if reset is None:
        return None
    parameters = inspect.signature(reset).parameters.values()
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needs_some = any(p.default is inspect.Parameter.empty and p.kind not in optional for p in parameters)
    return None if needs_some else reset


def _reset_parametrized(module: nn.Module, reset: Callable[[], None]) -> None:
    """Call `reset`, which fills the tensors that parametrizations compute, and give these to the parametrizations.

    One without `right_inverse` takes them as its original, as when it is registered on a module that has values.
    """
    lists: Any = module.parametrizations
    with cached():
        reset()
        values = {name: getattr(module, name) for name in lists}
    for name, value in values.items():
        if all(hasattr(parametrization, "right_inverse") for parametrization in lists[name]):
            setattr(module, name, value)
        else:
            lists[name].original.copy_(value)


class _Writes(TorchDispatchMode):
    """The storages into which operators write."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.storages |= {storage_key(tensor) for tensor in written_tensors(func, args, kwargs or {})}
        return func(*args, **(kwargs or {}))


def parents_that_initialize(model: nn.Module, blocks: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Return modules outside of `blocks` whose initializers fill parameters of others, and the names of these.

    They are tried on the meta device. One that cannot run there is taken to fill its own alone.
    """
    inside = tuple(f"{name}." for name in blocks)
    # Those of transformers write nothing that is real; a user's may write its buffers.
    tried = model if isinstance(model, PreTrainedModel) else _copied(model)
    names: dict[int, list[str]] = {}
    for name, parameter in tried.named_parameters(remove_duplicate=False):
        names.setdefault(storage_key(parameter), []).append(name)
    initializers = {}
    for name, module in tried.named_modules():
        if name in blocks or name.startswith(inside) or not any(True for _ in module.children()):
            continue
        own = {storage_key(parameter) for parameter in module.parameters(recurse=False)}
        written = _written_by_initializer(tried, module) - own
        others = [alias for key in names if key in written for alias in names[key]]
        if others:
            initializers[name] = tuple(others)
    return initializers


def _copied(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except RuntimeError as error:  # torch copies no tensor that was computed from parameters
        raise ModelError(
            f"{type(model).__name__} cannot be copied: {error}; compute tensors from parameters in forward and keep "
            "none of them on a module"
        ) from error


def _written_by_initializer(model: nn.Module, module: nn.Module) -> set[int]:
    """Return the storages that the initializer of `module` writes."""
    writes = _Writes()
    with contextlib.suppress(Exception), torch.no_grad(), torch.random.fork_rng(devices=[]), writes:
        run_initializer(model, module)
    return writes.storages
