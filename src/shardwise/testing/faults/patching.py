"""Planting of faults: a function of the engine is replaced for a while; the oracle stays whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

from shardwise.parallel.model import ParallelModel
from shardwise.parallel.tensor_map import ParameterEntry
from shardwise.training import setup

RANK = 1  # the rank that goes wrong
MICROBATCH = 1  # the microbatch that goes wrong

Fault = Callable[[], AbstractContextManager[None]]


@contextmanager
def wrapped(owner: Any, name: str, wrapper: Callable[..., Any]) -> Iterator[None]:
    """Let `owner.name` be `wrapper(original, *args, **kwargs)` inside."""
    original = getattr(owner, name)

    def run(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    with mock.patch.object(owner, name, run):
        yield


@contextmanager
def everywhere(name: str, wrapper: Callable[..., Any], *modules: Any) -> Iterator[None]:
    """Do the same for a function that several modules have imported by name."""
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(wrapped(module, name, wrapper))
        yield


def hooked(suffix: str, hook: Callable[..., Any]) -> AbstractContextManager[None]:
    """Give modules whose name ends so a forward hook once the model is parallel."""

    def wrapper(original: Callable[..., Any], *args: Any, **more: Any) -> Any:
        model: ParallelModel = original(*args, **more)
        for part in model.parts:
            for name, module in part.module.named_modules():
                if name.endswith(suffix):
                    module.register_forward_hook(hook)
        return model

    return wrapped(setup, "parallelize", wrapper)


@contextmanager
def together(*faults: AbstractContextManager[Any]) -> Iterator[None]:
    """Plant several changes that are one fault."""
    with ExitStack() as stack:
        for fault in faults:
            stack.enter_context(fault)
        yield


def is_norm(entry: ParameterEntry) -> bool:
    """Return whether a parameter is a norm's weight."""
    return len(entry.shape) == 1 and entry.name.endswith("weight")


def chosen(entries: Sequence[ParameterEntry], test: Callable[[ParameterEntry], bool]) -> list[ParameterEntry]:
    """Return the parameters that pass the test."""
    return [entry for entry in entries if test(entry)]
