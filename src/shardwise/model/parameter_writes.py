"""Writes of parameters in a forward, also those that leave no trace on the parameter: `weight.data.clamp_(0, 1)`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from shardwise._torch_compat.tracing import TorchDispatchMode
from shardwise._torch_compat.writes import storage_key, written_tensors


class ParameterWrites(TorchDispatchMode):
    """A mode that records which parameters operators write, by themselves, through a view or through `.data`."""

    def __init__(self) -> None:
        super().__init__()
        self._parameters: Mapping[str, Tensor] = {}
        self._names: dict[int, str] = {}
        self._written: set[str] = set()
        self.replaced: tuple[str, ...] = ()  # names of those in whose place the forward put another

    def watch(self, parameters: Mapping[str, Tensor]) -> None:
        """Record writes of `parameters`, by name, from now on."""
        self._parameters = parameters
        self._names = {storage_key(tensor): name for name, tensor in parameters.items()}

    def record_replaced(self, module: nn.Module, args: Any, output: Any) -> None:
        """Compare the parameters of `module` with those that are watched; a hook of its forward."""
        parameters = dict(module.named_parameters(remove_duplicate=False))
        self.replaced = tuple(name for name, tensor in self._parameters.items() if parameters.get(name) is not tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in written_tensors(func, args, kwargs or {}):
            if (name := self._names.get(storage_key(tensor))) is not None:
                self._written.add(name)
        return func(*args, **(kwargs or {}))

    def written(self) -> tuple[str, ...]:
        """Return the names of the parameters that were written, or given other memory by `weight.data = ...`."""
        storages = {name: storage for storage, name in self._names.items()}
        replaced = {name for name, tensor in self._parameters.items() if storage_key(tensor) != storages[name]}
        return tuple(sorted(self._written | replaced))
