"""Lists, dicts and objects that a block is given: the block writes into the caller's own, as without sharding.

FSDP2 replaces the tensors among a unit's arguments, and makes the containers anew that hold them: what a block appends
would be lost. A call with containers is therefore opened ahead of FSDP2, which gets the tensors alone. Then they lie in
the caller's containers while the block runs, and the caller's own tensors are put back behind it.

What a block leaves in containers, in objects and on itself comes out of the unit like its output. Backward has to
gather the unit for it too.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardwise._torch_compat.autograd import version_of
from shardwise._torch_compat.fsdp2 import gather_ahead_of_backward
from shardwise.model.containers import (
    Pairs,
    is_changeable,
    is_record,
    module_attributes,
    pairs_of,
    replace_objects,
    walk,
)

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class CallerContainers:
    """Hooks on a module around those of FSDP2: `watch` comes behind `fully_shard`, all else ahead of it."""

    def __init__(self, module: nn.Module, keeps_tensors: bool) -> None:
        """Put the hooks on `module` that run inside of FSDP2's.

        Args:
            module: not sharded yet.
            keeps_tensors: whether the module may keep tensors on itself that backward goes through.
        """
        self._keeps_tensors = keeps_tensors
        self._calls: list[_Call] = []
        self._kept: dict[int, weakref.ref[Tensor]] = {}
        module.register_forward_pre_hook(self._close, prepend=True, with_kwargs=True)
        module.register_forward_hook(self._restore)

    def watch(self, module: FSDPModule) -> None:
        """Put the hook on `module` that runs ahead of FSDP2's."""
        module.register_forward_pre_hook(self._open, prepend=True, with_kwargs=True)  # type: ignore[attr-defined]

    def _open(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        call = _Call((args, kwargs))
        self._calls.append(call)
        return (tuple(call.tensors), {}) if call.is_opened else None

    def _close(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        call = self._calls[-1]
        return call.with_tensors(args) if call.is_opened else None

    def _restore(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        call = self._calls.pop()
        call.restore()
        left = list(call.left_by_module())
        if is_changeable(output) or (isinstance(output, tuple) and any(map(is_changeable, output))):
            left += walk(output)
        if self._keeps_tensors:
            left += self._new_attributes(module)
        tensors = [value for value in left if isinstance(value, Tensor) and value.grad_fn is not None]
        if tensors:
            gather_ahead_of_backward(module, tensors)  # type: ignore[arg-type]

    def _new_attributes(self, module: nn.Module) -> Iterator[Tensor]:
        """Yield the tensors that lie in attributes of the module and those below it since this call."""
        kept = {
            id(value): weakref.ref(value)
            for value in walk(*(value for part in module.modules() for value in module_attributes(part).values()))
            if isinstance(value, Tensor)
        }
        for key, reference in kept.items():
            tensor = reference()
            if tensor is not None and (key not in self._kept or self._kept[key]() is not tensor):
                yield tensor
        self._kept = kept


class _Call:
    """One call of a module.

    Attributes:
        is_opened: it has containers that FSDP2 would make anew.
        tensors: those among its arguments, each once.
    """

    def __init__(self, arguments: Arguments) -> None:
        self._arguments = arguments
        args, kwargs = arguments
        given = list(walk(*args, *kwargs.values()))
        self._changeable = [value for value in given if is_changeable(value)]
        self.is_opened = any(isinstance(value, list | dict) or is_record(value) for value in self._changeable)
        self.tensors = [value for value in given if isinstance(value, Tensor)]
        self._copies: list[tuple[Tensor, Tensor, int]] = []
        self._pairs: Pairs = {}

    def with_tensors(self, tensors: tuple[Tensor, ...]) -> Arguments:
        """Return the arguments with FSDP2's `tensors` in the place of the caller's, in the caller's containers."""
        self._copies = [
            (own, other, version_of(other))
            for own, other in zip(self.tensors, tensors, strict=True)
            if other.dtype != own.dtype
        ]
        self._pairs = pairs_of(self.tensors, tensors)
        args, kwargs = self._arguments
        given = tuple(replace_objects(value, self._pairs) for value in args)
        return given, {name: replace_objects(value, self._pairs) for name, value in kwargs.items()}

    def restore(self) -> None:
        """Put the caller's tensors back into its containers, as far as the module has left the others there."""
        pairs = {id(other): (other, own) for own, other in self._pairs.values() if other is not own}
        if pairs:
            for value in self._changeable:
                replace_objects(value, pairs)
        with torch.no_grad():
            for own, other, version in self._copies:
                if version_of(other) != version:
                    own.copy_(other)

    def left_by_module(self) -> Iterator[Any]:
        """Yield what lies in containers and objects now and has not been given."""
        given = {id(value) for value in self.tensors}
        given |= {id(other) for _, other in self._pairs.values()}
        yield from (value for value in walk(*self._changeable) if id(value) not in given)
