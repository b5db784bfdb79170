"""Recomputation of a checkpointed block: it finds what the forward has found, and leaves no trace.

A block may append to a list that it is given, count its calls or keep running statistics. Run a second time as it is,
it would find what the first run has left, and leave it twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise._torch_compat.autograd import version_of
from shardwise.errors import ModelError
from shardwise.model.containers import Pairs, copied, is_changeable, is_unchanged, module_attributes, walk
from shardwise.model.gradient_hooks import definition_of

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class GivenArguments:
    """The arguments of a call as the block finds them; tensors are shared.

    Args:
        args, kwargs: without the hidden states, which would stay in the device's memory until backward.
        hidden: them, if the call has some.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Any = None) -> None:
        given = list(walk(*args, *kwargs.values()))
        self._arguments: Arguments = (args, kwargs)
        self._has_containers = any(is_changeable(value) for value in given)
        if self._has_containers:
            self._arguments = copied((args, kwargs), {})
        tensors = [value for value in (hidden, *given) if isinstance(value, Tensor)]
        self._versions = [(tensor, version_of(tensor)) for tensor in tensors]

    def again(self) -> Arguments:
        """Return the arguments for another run."""
        return copied(self._arguments, {}) if self._has_containers else self._arguments

    def check_not_written(self, block: nn.Module) -> None:
        """Raise a ModelError if the run has written a tensor in place: another run would start from what it wrote."""
        versions, self._versions = self._versions, []
        if any(version_of(tensor) != version for tensor, version in versions):
            raise ModelError(
                f"{definition_of(block)} writes a tensor that it is given, in place; memory.activation_checkpointing "
                "would run the block again on what it has written. Let it write a copy, or use "
                "activation_checkpointing none"
            )


@dataclass(frozen=True)
class FoundState:
    """Copies of attributes and buffers of modules, ahead of a call.

    Attributes:
        attributes: of each module, by name; `pairs` has the tensors among them with their copies and versions.
        buffers: copies of the modules' own buffers, with the buffers and their versions.
    """

    attributes: dict[nn.Module, dict[str, Any]]
    pairs: Pairs
    versions: dict[int, int]
    buffers: dict[tuple[nn.Module, str], tuple[Tensor, Tensor, int]]

    def changed_modules(self) -> list[nn.Module]:
        """Return the modules whose attributes are no longer what was found."""
        written = {key for key, (tensor, _) in self.pairs.items() if self.versions.get(key, 0) != _version(tensor)}
        originals = {id(twin): value for key, (value, twin) in self.pairs.items() if key not in written}
        return [
            module
            for module, attributes in self.attributes.items()
            if not is_unchanged(module_attributes(module), attributes, originals)
        ]

    def written_buffers(self) -> list[tuple[nn.Module, str]]:
        """Return the buffers that were written or exchanged."""
        return [
            (module, name)
            for (module, name), (buffer, before, version) in self.buffers.items()
            if module.get_buffer(name) is not buffer
            or version_of(buffer) != version
            or not torch.equal(buffer, before)  # batch norm writes past autograd's count
        ]


def _version(value: Any) -> int:
    return version_of(value) if isinstance(value, Tensor) else 0


class BlockState:
    """State that modules of checkpointed blocks keep between calls: attributes, and buffers that a forward writes.

    Which modules and buffers change is seen in the first call; afterwards these alone are looked after.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        modules = list(dict.fromkeys(module for block in blocks for module in block.modules()))
        self._modules = modules
        self._buffers = [(module, name) for module in modules for name, _ in module.named_buffers(recurse=False)]
        self._is_known = False

    def find(self) -> FoundState:
        """Return what a call is about to find."""
        attributes = {module: module_attributes(module) for module in self._modules}
        tensors = [
            value for value in walk(*attributes.values()) if isinstance(value, Tensor) and not value.requires_grad
        ]
        pairs: Pairs = {id(tensor): (tensor, tensor.clone()) for tensor in tensors}
        versions = {id(tensor): version_of(tensor) for tensor in tensors}
        copies = {module: copied(values, pairs) for module, values in attributes.items()}
        buffers = {key: key[0].get_buffer(key[1]) for key in self._buffers}
        return FoundState(
            copies,
            pairs,
            versions,
            {key: (buffer, buffer.clone(), version_of(buffer)) for key, buffer in buffers.items()},
        )

    def learn(self, state: FoundState) -> None:
        """See from the first call what changes."""
        if not self._is_known:
            self._modules, self._buffers = state.changed_modules(), state.written_buffers()
            self._is_known = True

    @contextmanager
    def as_found(self, state: FoundState) -> Iterator[None]:
        """Let the modules have what was found, inside; outside they have what they have now."""
        attributes = {module: module_attributes(module) for module in self._modules}
        buffers = {(module, name): module.get_buffer(name) for module, name in self._buffers}
        for module in self._modules:
            _set_attributes(module, copied(state.attributes[module], {}))
        for module, name in self._buffers:
            setattr(module, name, state.buffers[module, name][1].clone())
        try:
            yield
        finally:
            for module, values in attributes.items():
                _set_attributes(module, values)
            for (module, name), buffer in buffers.items():
                setattr(module, name, buffer)


def _set_attributes(module: nn.Module, values: dict[str, Any]) -> None:
    for name in module_attributes(module).keys() - values.keys():
        del vars(module)[name]
    vars(module).update(values)
