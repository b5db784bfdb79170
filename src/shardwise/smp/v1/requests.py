"""Requests of a script for its modules before they are distributed: partitions, checkpointing, tensor parallelism.

Requests are kept by module, not on it, so that a model stays what its author wrote. They are read once, when the model
is built; the contexts mark the modules that are created inside of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardwise.smp.exceptions import SMPValidationError
from shardwise.smp.v1.session import state

ReplacementHooks = tuple[Callable[..., Any] | None, Callable[..., Any] | None, Callable[..., Any] | None]


@dataclass(frozen=True)
class CheckpointRequest:
    """A strategy of recomputing a module's activations."""

    strategy: str = "each"
    preserve_rng_state: bool = True


@dataclass
class ModuleRequests:
    """Stage, checkpointing and replacement of each module that a script has asked for them."""

    partitions: Any = field(default_factory=weakref.WeakKeyDictionary)
    checkpointing: Any = field(default_factory=weakref.WeakKeyDictionary)
    tensor: Any = field(default_factory=weakref.WeakKeyDictionary)
    arguments: Any = field(default_factory=weakref.WeakKeyDictionary)  # with what a module was created
    inside: list[Callable[[nn.Module], None]] = field(default_factory=list)  # of the contexts that are open


requests = ModuleRequests()


@contextmanager
def _created(mark: Callable[[nn.Module], None]) -> Iterator[None]:
    """`mark` every module created inside; of nested contexts the innermost is last and wins."""
    original = nn.Module.__init__
    outermost = not requests.inside
    requests.inside.append(mark)

    def init(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(module, *args, **kwargs)
        for marked in requests.inside:
            marked(module)

    if outermost:
        nn.Module.__init__ = init  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        requests.inside.pop()
        if outermost:
            nn.Module.__init__ = original  # type: ignore[method-assign]


@contextmanager
def partition(index: int) -> Iterator[None]:
    """Modules created inside belong to stage `index`, where `auto_partition` is off."""
    with _created(lambda module: requests.partitions.__setitem__(module, index)):
        yield


def set_partition(module: nn.Module, index: int) -> None:
    """Put `module` on stage `index`, where `auto_partition` is off. Call it before the first step.

    Raises:
        SMPValidationError: there is no such stage.
    """
    stages = int(state.cfg.pipeline_parallel_degree)
    if not 0 <= index < stages:
        raise SMPValidationError(f"set_partition: stage {index} does not exist; there are {stages}, from 0")
    requests.partitions[module] = index


def set_activation_checkpointing(
    module: nn.Module,
    preserve_rng_state: bool = True,
    pack_args_as_tuple: bool = False,
    strategy: str = "each",
) -> None:
    """Recompute the activations of `module` in backward instead of keeping them. Call it before the first step.

    Args:
        module: a block, a container of blocks, or any other module.
        preserve_rng_state: accepted; random numbers are always drawn again as they were.
        pack_args_as_tuple: accepted; a module gets its arguments as its caller gives them.
        strategy: of a container: `each` child by itself, all as one (`contiguous`), or N as one (`group_N`).

    Raises:
        SMPValidationError: there is no such strategy.
    """
    check_strategy(strategy)
    requests.checkpointing[module] = CheckpointRequest(strategy, preserve_rng_state)


def check_strategy(strategy: str) -> None:
    """Raise SMPValidationError for an unknown strategy of checkpointing."""
    prefix, _, count = strategy.partition("_")
    if strategy not in ("each", "contiguous") and not (prefix == "group" and count.isdecimal() and int(count)):
        raise SMPValidationError(f"strategy={strategy!r} must be each, contiguous or group_N with N from 1")


@contextmanager
def tensor_parallelism(enabled: bool = True, **tp_config: Any) -> Iterator[None]:
    """Modules created inside are replaced by distributed ones when the model is wrapped, where there are such.

    Args:
        enabled: False excepts what is created inside from an outer context.
        tp_config: settings of the distributed modules; those that a module does not have are left out.
    """
    with _created(lambda module: requests.tensor.__setitem__(module, tp_config if enabled else None)):
        yield


def set_tensor_parallelism(module: nn.Module, enabled: bool = True, **tp_config: Any) -> None:
    """`tensor_parallelism` for a module that is there already, and all below it. Call it before wrapping."""
    for inner in module.modules():
        requests.tensor[inner] = tp_config if enabled else None


@contextmanager
def delay_param_initialization(enabled: bool = True) -> Iterator[None]:
    """Parameters created inside take no memory; their values are drawn when the model is distributed."""
    with torch.device("meta") if enabled else ExitStack():
        yield


@contextmanager
def model_creation(
    tensor_parallelism: bool = False, dtype: torch.dtype | None = None, **tp_config: Any
) -> Iterator[None]:
    """The contexts in which scripts create their model: tensor parallelism, delayed initialization, default dtype.

    Args:
        tensor_parallelism: as the context of that name, with `tp_config`.
        dtype: of the parameters that are created inside.
        tp_config: settings of the distributed modules.
    """
    delayed = state.initialized and bool(state.cfg.delayed_parameter_initialization)
    before = torch.get_default_dtype()
    with ExitStack() as stack:
        if tensor_parallelism:
            stack.enter_context(_tensor_parallelism(True, **tp_config))
        stack.enter_context(delay_param_initialization(delayed))
        if dtype is not None:
            torch.set_default_dtype(dtype)
            stack.callback(torch.set_default_dtype, before)
        yield


_tensor_parallelism = tensor_parallelism  # under a name that no argument hides
