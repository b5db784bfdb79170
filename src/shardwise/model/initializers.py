"""Runs the initializers that modules have, and tells which of them fill parameters of modules below them.

transformers' models have `_init_weights(module)`, of which the nearest model's counts: the module itself, or the
innermost that it lies in. Torch's modules have `reset_parameters()`. Modules of one's own have either, or both: what
`_init_weights` of the outermost module does comes after the module's own.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import cached, is_parametrized
from transformers import PreTrainedModel

from shardwise._torch_compat.tracing import TorchDispatchMode
from shardwise._torch_compat.writes import SkippedFills, storage_key, written_tensors
from shardwise.errors import ModelError
from shardwise.model.config_cache import once_a_config
from shardwise.model.containers import module_attributes, walk
from shardwise.model.copies import deep_copy
from shardwise.model.gradient_hooks import definition_of

MODEL_INITIALIZER = "_init_weights"
ABSENT = "absent_parameters"  # of a module on a stage: those that others hold, by name, on meta
# Operators whose result does not follow from what the tensor held.
FILLS = {
    torch.ops.aten.normal_, torch.ops.aten.uniform_, torch.ops.aten.fill_, torch.ops.aten.zero_, torch.ops.aten.copy_,
    torch.ops.aten.exponential_, torch.ops.aten.log_normal_, torch.ops.aten.bernoulli_, torch.ops.aten.random_,
}  # fmt: skip
MODULE_INITIALIZERS = ("reset_parameters", "_reset_parameters")  # the second is torch's, in `nn.MultiheadAttention`


def run_initializer(model: nn.Module, name: str) -> None:
    """Run what fills the module `name` of `model`; of a user's module its `reset_parameters`, then `_init_weights`."""
    module = model.get_submodule(name)
    if not isinstance(model, PreTrainedModel) or not callable(getattr(model, MODEL_INITIALIZER, None)):
        reset = _reset_of(module)
        if reset is not None and is_parametrized(module):
            _reset_parametrized(module, reset)
        elif reset is not None:
            reset()
    init_weights = getattr(_initializing_model(model, name), MODEL_INITIALIZER, None)
    if callable(init_weights):
        _fill(module, init_weights)


def _fill(module: nn.Module, init_weights: Callable[[nn.Module], None]) -> None:
    """Fill a module by its model's initializer, which reaches for what a stage has taken away too (T5Gemma 2's)."""
    absent = [(part, _absent_parameters(part)) for part in module.modules()]
    for part, parameters in absent:
        for name, parameter in parameters.items():
            part.register_parameter(name, parameter)  # on meta, where no number is drawn
    try:
        init_weights(module)
    finally:
        for part, parameters in absent:
            for name in parameters:
                part.register_parameter(name, None)


def _absent_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return what stands for the parameters that a stage lacks; another stage of this rank may have given some back."""
    stand_ins: Mapping[str, nn.Parameter] = vars(module).get(ABSENT, {})
    return {name: parameter for name, parameter in stand_ins.items() if getattr(module, name) is None}


def _initializing_model(model: nn.Module, name: str) -> nn.Module:
    """Return the model whose initializer fills the module `name`: of transformers' the innermost around it."""
    nearest = module = model
    if isinstance(model, PreTrainedModel):
        for part in name.split(".") if name else ():
            module = getattr(module, part)
            nearest = module if isinstance(module, PreTrainedModel) else nearest
    return nearest


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
    """The storages into which operators write.

    Attributes:
        filled: those that were written whole, with what does not follow from their values before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()
        self.filled: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        written = list(written_tensors(func, args, kwargs or {}))
        self.storages |= {storage_key(tensor) for tensor in written}
        if func.overloadpacket in FILLS:
            self.filled |= {storage_key(tensor) for tensor in written if _is_whole(tensor)}
        return func(*args, **(kwargs or {}))

    def fill(self, tensor: Tensor) -> None:
        """Note that a tensor is filled."""
        self.storages.add(storage_key(tensor))
        self.filled.add(storage_key(tensor))

    def watch(self, model: nn.Module, name: str) -> None:
        """Run the initializer of the module `name`; where it raises, as some do on the meta device, it ends there."""
        unseen = torch.random.fork_rng(devices=[])
        with contextlib.suppress(Exception), torch.no_grad(), unseen, SkippedFills(self.fill), self:
            run_initializer(model, name)


def _is_whole(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


@once_a_config
def unfilled_parameters(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the parameters of a transformers model on the meta device that no initializer fills whole.

    Their values are those of their constructors, or these changed by an initializer.
    """
    targets = set(model.all_tied_weights_keys)  # set to other parameters when all are filled
    filled: set[int] = set()
    for name, module in model.named_modules():
        writes = _Writes()
        writes.watch(model, name)
        own = module.named_parameters(prefix=name, recurse=False, remove_duplicate=False)
        filled |= writes.filled - {storage_key(parameter) for key, parameter in own if key in targets}
    return tuple(name for name, parameter in model.named_parameters() if storage_key(parameter) not in filled)


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
        written = _written_by_initializer(tried, name) - own
        others = [alias for key in names if key in written for alias in names[key]]
        if others:
            initializers[name] = tuple(others)
    return initializers


def _copied(model: nn.Module) -> nn.Module:
    try:
        return deep_copy(model)
    except RuntimeError as error:  # torch copies no tensor that was computed from parameters
        raise ModelError(
            f"{_derived_attribute(model)} of {definition_of(model)} keeps a tensor made from parameters; compute it in "
            "forward, or register a buffer of a clone"
        ) from error


def _derived_attribute(model: nn.Module) -> str:
    """Return the first attribute that holds a tensor with a graph of autograd."""
    attributes = (
        f"{name}.{attribute}".lstrip(".")
        for name, module in model.named_modules()
        for attribute, value in module_attributes(module).items()
        if any(isinstance(inner, Tensor) and inner.grad_fn is not None for inner in walk(value, into_functions=True))
    )
    return next(attributes, "an attribute")


def _written_by_initializer(model: nn.Module, name: str) -> set[int]:
    """Return the storages that the initializer of the module `name` writes."""
    writes = _Writes()
    writes.watch(model, name)
    return writes.storages
