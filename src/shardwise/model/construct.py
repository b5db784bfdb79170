"""Builds a module of the user's own on the meta device, and keeps what its constructor computed.

A parameter moves to the meta device as soon as a module registers it, so that no process holds a model that it is going
to shard. What the constructor does is watched:

- values that a parameter is registered with are kept;
- what `reset_parameters` of a module (or `_init_weights` of the outermost one) fills is drawn later, by name and seed,
  if it fills the same when it runs again;
- anything else (weights that are loaded, rescaled, tied by value or computed from each other) cannot be told without
  values. Then the module is built a second time, for real on the CPU of rank 0, and all values are those.

A constructor that does not run without values is run with them on every rank. Each time it draws from the job's seed,
so that what it keeps beside parameters and buffers is equal on all ranks.
"""

from __future__ import annotations

import itertools
import random
import sys
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from transformers import PreTrainedModel

from shardwise._torch_compat import accelerator
from shardwise._torch_compat.autograd import share_gradient_hooks
from shardwise._torch_compat.tracing import TorchDispatchMode
from shardwise._torch_compat.writes import SkippedFills, storage_key, written_tensors
from shardwise.errors import ModelError
from shardwise.model.copies import deep_copy
from shardwise.model.initializers import MODEL_INITIALIZER, MODULE_INITIALIZERS, run_initializer
from shardwise.model.parameter_kinds import DECLARED_CLASS, mark_shared_tensors

Factory = Callable[[], nn.Module]


class NotAModule(TypeError):
    """A factory returned something else."""


@dataclass
class ConstructedModule:
    """A module on the meta device, and what is known of its values.

    Attributes:
        module: parameters on the meta device; buffers have values, where these do not follow from parameters.
        values: of parameters that their constructor has given some, by name; of all tensors where `is_complete`.
        needs_values: whether `build` has to say what the values are.
        is_complete: whether the constructor has run with values.
        factory: makes the module again.
    """

    module: nn.Module
    values: dict[str, Tensor]
    needs_values: bool
    is_complete: bool
    factory: Factory

    def build(self) -> dict[str, Tensor]:
        """Build the module for real; return the values of parameters and buffers, on the CPU."""
        return self.values if self.is_complete else _with_values(self.factory).values


def construct(source: Factory, seed: int) -> ConstructedModule:
    """Call `source`, which draws from `seed`, and return its module on the meta device.

    Raises:
        Exception: whatever the factory raises.
    """

    def factory() -> nn.Module:
        with drawing_from(seed):
            return source()

    writes = ConstructorWrites()
    try:
        with uninitialized_is_nan(), parameters_on_meta(writes.register), SkippedFills(writes.note_write), writes:
            module = factory()
    except Exception:  # it may read values, which are not there
        return _with_values(factory)
    if not isinstance(module, nn.Module):
        raise NotAModule(f"returned a {type(module).__name__}; it must return a torch.nn.Module")
    has_real = any(not parameter.is_meta and not is_lazy(parameter) for parameter in module.parameters())
    if writes.has_failed or has_real:  # of the latter some were not registered by their modules
        return _with_values(factory)
    values, is_known = writes.values_of(module)
    return ConstructedModule(module, values, not is_known or _has_meta_tensors(module), False, factory)


@contextmanager
def drawing_from(seed: int) -> Iterator[None]:
    """Inside, torch, numpy and Python draw from `seed`; behind it they go on from where they were."""
    of_python, of_numpy = random.getstate(), numpy.random.get_state()
    with accelerator.generators_kept(accelerator.entered()):
        torch.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(of_python)
            numpy.random.set_state(of_numpy)


def _has_meta_tensors(module: nn.Module) -> bool:
    """Tell whether a buffer, or a tensor that a module keeps as an attribute, was made from parameters."""
    kept = (value for part in module.modules() for value in vars(part).values() if isinstance(value, Tensor))
    return any(tensor.is_meta for tensor in (*module.buffers(), *kept))


def _with_values(factory: Factory) -> ConstructedModule:
    with uninitialized_is_nan():
        module = factory()
    if not isinstance(module, nn.Module):
        raise NotAModule(f"returned a {type(module).__name__}; it must return a torch.nn.Module")
    values = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    return ConstructedModule(module, values | detach_weights(module), False, True, factory)


def detach_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return the values of all parameters by name, out of the module, whose parameters then take no memory."""
    mark_shared_tensors(module)
    weights: dict[str, Tensor] = {}
    blanks: dict[int, nn.Parameter] = {}
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        if is_lazy(parameter):
            continue
        if id(parameter) not in blanks:
            blanks[id(parameter)] = meta_parameter(parameter)
            weights[name] = parameter.detach()
        owner, _, leaf = name.rpartition(".")
        module.get_submodule(owner).register_parameter(leaf, blanks[id(parameter)])
    return weights


def meta_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter without values that has all else of `parameter`: its attributes and hooks."""
    meta = nn.Parameter(torch.empty_like(parameter.detach(), device="meta"), requires_grad=parameter.requires_grad)
    meta.__dict__.update(parameter.__dict__)
    if type(parameter) is not nn.Parameter:
        setattr(meta, DECLARED_CLASS, type(parameter).__name__)
    share_gradient_hooks(parameter, meta)
    return meta


def _is_unset(value: Tensor) -> bool:
    """Return True if part of a value is what `uninitialized_is_nan` leaves."""
    return (value.is_floating_point() or value.is_complex()) and bool(value.isnan().any())


@contextmanager
def uninitialized_is_nan() -> Iterator[None]:
    """Inside, torch fills uninitialized memory of floating dtypes with NaN."""
    was, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warned)


@contextmanager
def parameters_on_meta(
    registered: Callable[[Tensor, nn.Parameter], None] | None = None, real: Collection[int] = ()
) -> Iterator[None]:
    """Inside, each parameter that a module registers moves to the meta device at once; buffers stay real.

    A parameter registered under several names stays one parameter.

    Args:
        registered: told of each parameter as it was given, and of the one that the module has.
        real: numbers of parameters that stay as they are, in the order in which they are first registered.
    """
    original = nn.Module.register_parameter
    moved: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}
    numbers = itertools.count()

    def to_meta(parameter: nn.Parameter) -> nn.Parameter:
        source, meta = moved.get(id(parameter), (None, None))
        if meta is None or source is None or source() is not parameter:  # an id may be reused after its owner died
            # Numbered too if it was computed from one on meta: in another run that one may be real.
            stays = next(numbers) in real or parameter.device.type == "meta"
            meta = parameter if stays else meta_parameter(parameter)
            moved[id(parameter)] = (weakref.ref(parameter), meta)
        return meta

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        given = param
        if param is not None and not is_lazy(param):
            param = to_meta(param)
        original(self, name, param)
        if registered is not None and given is not None and param is not None and not is_lazy(param):
            registered(given, param)

    nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


@dataclass
class _ParameterSource:
    """The origin of a parameter's values, as far as the constructor has come.

    Attributes:
        value: that it was registered with; None where that was uninitialized memory.
        initializer: the module whose initializer wrote it last, and the initializer's name; None where none did.
        is_known: whether `value` and `initializer` say all.
    """

    value: Tensor | None = None
    initializer: tuple[nn.Module, str] | None = None
    is_known: bool = True


@dataclass
class ConstructorWrites(TorchDispatchMode):
    """While a constructor runs, who gives the parameters on the meta device their values."""

    sources: dict[int, _ParameterSource] = field(default_factory=dict)  # by storage
    has_failed: bool = False  # an operator cannot run without values; the constructor may go on in another way
    kept: list[Tensor] = field(default_factory=list)  # a storage that dies could be taken for another

    def __post_init__(self) -> None:
        super().__init__()

    def register(self, given: Tensor, parameter: nn.Parameter) -> None:
        """Note the value with which a parameter was registered."""
        key = storage_key(parameter)
        if key in self.sources:
            return  # under another name
        value = given.detach()
        is_real = value.device.type != "meta"
        has_values = is_real and not _is_unset(value)
        self._add(parameter, _ParameterSource(value if has_values else None, is_known=is_real))

    def _add(self, tensor: Tensor, source: _ParameterSource) -> None:
        self.sources[storage_key(tensor)] = source
        self.kept.append(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            result = func(*args, **(kwargs or {}))
        except Exception:
            self.has_failed = True
            raise
        for tensor in written_tensors(func, args, kwargs or {}):
            self.note_write(tensor)
        is_cloned = func is torch.ops.aten.clone.default and args[0].device.type == "meta"
        if is_cloned:  # a copied module's parameters are made like this
            cloned = self.sources.get(storage_key(args[0]))
            if cloned is not None:
                self._add(result, replace(cloned))
        return result

    def note_write(self, tensor: Tensor) -> None:
        """Note that code which runs writes a tensor, if that is a parameter on the meta device."""
        source = self.sources.get(storage_key(tensor)) if tensor.device.type == "meta" else None
        if source is not None:
            source.initializer = running_initializer(sys._getframe(1), tensor)
            source.is_known = source.initializer is not None
            source.value = None

    def values_of(self, module: nn.Module) -> tuple[dict[str, Tensor], bool]:
        """Return the values with which parameters of `module` were registered, and whether all others are drawn."""
        values, is_known = {}, True
        writers = _writers_when_run_again(module)
        for name, parameter in module.named_parameters():
            if is_lazy(parameter):
                continue
            source = self.sources.get(storage_key(parameter))
            if source is None or not _is_repeated(source, module, writers.get(name)):
                is_known = False
            elif source.value is not None:
                values[name] = source.value
        return values, is_known


def running_initializer(frame: FrameType | None, tensor: Tensor) -> tuple[nn.Module, str] | None:
    """Return the module whose initializer has called `frame`, and its name; None where none has.

    A module's `reset_parameters` counts for the parameters below it.
    """
    while frame is not None:
        name, module = frame.f_code.co_name, frame.f_locals.get("self")
        if isinstance(module, nn.Module) and name == MODEL_INITIALIZER:
            return module, name
        if isinstance(module, nn.Module) and name in MODULE_INITIALIZERS:
            key = storage_key(tensor)
            on_meta = (parameter for parameter in module.parameters() if parameter.device.type == "meta")
            owns = any(storage_key(parameter) == key for parameter in on_meta)
            return (module, name) if owns else None
        frame = frame.f_back
    return None


def _writers_when_run_again(module: nn.Module) -> dict[str, tuple[type, str]]:
    """Return whose initializer, by class and name, fills each parameter last when all run again, children first.

    They are tried on a copy on the meta device. One that raises, for instance since what it fills was replaced, fills
    nothing.
    """
    try:
        copied = deep_copy(module)
    except Exception:  # any code may run in a copy
        return {}
    writes = ConstructorWrites()
    for parameter in copied.parameters():
        if not is_lazy(parameter):
            writes.register(parameter, parameter)
    with torch.no_grad(), torch.random.fork_rng(devices=[]), SkippedFills(writes.note_write), writes:
        for name in reversed([name for name, _ in copied.named_modules()]):
            with suppress(Exception):
                run_initializer(copied, name)
    known = {name: tensor for name, tensor in copied.named_parameters() if not is_lazy(tensor)}
    sources = {name: writes.sources.get(storage_key(tensor)) for name, tensor in known.items()}
    writers = {name: source.initializer for name, source in sources.items() if source is not None}
    return {name: (type(writer[0]), writer[1]) for name, writer in writers.items() if writer is not None}


def _is_repeated(source: _ParameterSource, module: nn.Module, again: tuple[type, str] | None) -> bool:
    """Tell whether the value is kept, or the initializer that gave it will be the last one again for `module`.

    Args:
        again: class and name of the initializer that fills the parameter last when all run again.
    """
    if source.initializer is None or not source.is_known:
        return source.is_known
    owner, name = source.initializer
    if isinstance(module, PreTrainedModel):
        return name != MODEL_INITIALIZER or owner is module or isinstance(owner, PreTrainedModel)
    return again == (type(owner), name) and (name != MODEL_INITIALIZER or owner is module)


def check_tensors(module: nn.Module, where: str) -> None:
    """Check that there is something to train, that every shape is known, and that buffers have values.

    Raises:
        ModelError: there is no parameter, one is lazy, or a buffer is uninitialized memory.
    """
    parameters = dict(module.named_parameters())
    if not parameters:
        raise ModelError(f"{where} returned a module without parameters; there is nothing to train")
    scripted = next((name for name, part in module.named_modules() if isinstance(part, torch.jit.ScriptModule)), None)
    if scripted is not None:
        raise ModelError(
            f"{where}: {scripted or 'the module'} is a torch.jit.ScriptModule, whose parameters cannot be made anew; "
            "leave torch.jit.script out, and set model.compile"
        )
    lazy = next((name for name, parameter in parameters.items() if is_lazy(parameter)), None)
    if lazy is not None:
        raise ModelError(f"{where}: parameter {lazy!r} is lazy; give every layer its sizes")
    for name, buffer in module.named_buffers():
        if not buffer.is_meta and _is_unset(buffer):
            raise ModelError(f"{where}: buffer {name!r} has no values: it holds uninitialized memory, or NaN")
