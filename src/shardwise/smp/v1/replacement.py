"""The modules of a script's model that are replaced by distributed ones when it is wrapped, and their weights' names.

Replaced is what was created under tensor parallelism and has a distributed class: of transformers' models those of
`nn.huggingface.models`, and what a script has registered. The outermost such module is taken; its weights are fresh,
unless `_match_weights` asks for those of the original.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from shardwise.smp.exceptions import SMPValidationError
from shardwise.smp.v1.nn.huggingface.models import REPLACED, distributed_module
from shardwise.smp.v1.nn.huggingface.translation import FAMILIES, to_hf, to_smp
from shardwise.smp.v1.requests import ReplacementHooks, requests
from shardwise.smp.v1.session import state

_registered: dict[type[nn.Module], tuple[type[nn.Module], ReplacementHooks]] = {}


def tp_register(
    dist_module: type[nn.Module],
    init_hook: Callable[..., Any] | None = None,
    forward_hook: Callable[..., Any] | None = None,
    return_hook: Callable[..., Any] | None = None,
) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Class decorator: under tensor parallelism `dist_module` takes the place of the class.

    Args:
        dist_module: a class whose constructor and forward take what the hooks make of the original's arguments.
        init_hook, forward_hook: (arguments of the original) -> (args, kwargs) for `dist_module`.
        return_hook: output of `dist_module` -> output as of the original.
    """

    def register(module_cls: type[nn.Module]) -> type[nn.Module]:
        tp_register_with_module(module_cls, dist_module, init_hook, forward_hook, return_hook)
        return module_cls

    return register


def tp_register_with_module(
    module_cls: type[nn.Module],
    dist_module: type[nn.Module],
    init_hook: Callable[..., Any] | None = None,
    forward_hook: Callable[..., Any] | None = None,
    return_hook: Callable[..., Any] | None = None,
) -> None:
    """`tp_register` for a class of somebody else's; also after instances of it were made, before wrapping."""
    _registered[module_cls] = (dist_module, (init_hook, forward_hook, return_hook))
    original = module_cls.__init__

    @functools.wraps(original)
    def init(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(module, *args, **kwargs)
        requests.arguments[module] = (args, kwargs)

    module_cls.__init__ = init  # type: ignore[method-assign,assignment]


def register_parameter(module: nn.Module, param: nn.Parameter) -> None:
    """Accepted: a parameter that a module uses and another owns is gathered with its owner's unit."""


def replace_modules(module: nn.Module) -> nn.Module:
    """Return the model with what was created under tensor parallelism replaced."""
    if _settings(module) is not None and (replacement := _replacement(module)) is not None:
        return replacement
    for parent, name, child in list(_outermost(module)):
        replacement = _replacement(child)
        assert replacement is not None
        setattr(parent, name, replacement)
    return module


def _outermost(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Yield (parent, name, child) of modules to be replaced that are not inside of another such."""
    for name, child in module.named_children():
        if _settings(child) is not None and (type(child) in _registered or type(child).__name__ in REPLACED):
            yield module, name, child
        else:
            yield from _outermost(child)


def _settings(module: nn.Module) -> dict[str, Any] | None:
    return requests.tensor.get(module)


def _replacement(module: nn.Module) -> nn.Module | None:
    settings = _settings(module) or {}
    if type(module) in _registered:
        return _registered_one(module, settings)
    if type(module).__name__ not in REPLACED or getattr(module, "config", None) is None:
        return None
    meta = any(parameter.is_meta for parameter in module.parameters())
    with torch.device("meta") if meta else torch.device("cpu"):
        replacement = distributed_module(module, **settings)
    replacement.to(next(module.parameters()).dtype)
    replacement.train(module.training)
    if state.cfg._match_weights and not meta and replacement.smp_family not in ("bert", "roberta"):
        replacement.load_state_dict(to_smp(dict(module.state_dict()), replacement.smp_family, _heads(replacement)))  # type: ignore[arg-type]
    return replacement


def _registered_one(module: nn.Module, settings: dict[str, Any]) -> nn.Module:
    distributed_class, (init, forward, back) = _registered[type(module)]
    args, kwargs = _arguments(module)
    if init is not None:
        args, kwargs = init(*args, **kwargs)
    known = inspect.signature(distributed_class.__init__).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    extra = {k: v for k, v in settings.items() if (takes_all or k in known) and k not in kwargs}
    replacement = distributed_class(*args, **kwargs, **extra)
    inner = replacement.forward

    def call(*args: Any, **kwargs: Any) -> Any:
        if forward is not None:
            args, kwargs = forward(*args, **kwargs)
        output = inner(*args, **kwargs)
        return output if back is None else back(output)

    replacement.forward = call  # type: ignore[method-assign]
    return replacement


def _arguments(module: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with which a module was made; for one older than its registration, its config."""
    if module in requests.arguments:
        return requests.arguments[module]  # type: ignore[no-any-return]
    config = next((inner.config for inner in module.modules() if hasattr(inner, "config")), None)
    if config is None:
        raise SMPValidationError(
            f"{type(module).__name__} was created before smp.tp_register_with_module, and has no config to make its "
            "distributed module from; register the class first"
        )
    return (config,), {}


def _heads(module: nn.Module) -> int | None:
    return getattr(module, "num_attention_heads", None)


def translate_in(module: nn.Module, weights: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return weights in the names of the module, where they are in those of a Hugging Face model."""
    family = getattr(module, "smp_family", None)
    if family is None or any(name.startswith("transformer.seq_layers.") for name in weights):
        return weights
    translated: Mapping[str, Any] = to_smp(dict(weights), str(family), _heads(module))
    return translated


def translate_out(module: nn.Module, weights: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return weights in the names of the Hugging Face model that the module took the place of."""
    family = getattr(module, "smp_family", None)
    if family not in FAMILIES:
        return weights
    translated: Mapping[str, Any] = to_hf(dict(weights), str(family), _heads(module))
    return translated
