"""Optimizers that are none of torch's: scripts of 2021 and 2022 wrap theirs in a class of their own, for 16 bits.

What such an object has stays its own: attributes, step, state. It gains the numbers of its parameters, by which such
scripts save, and finds gradients that are complete. Its parameters are those of the torch optimizer inside of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from shardwise.errors import ModelError
from shardwise.smp.v1.optimizer_state import full_state, local_of, local_state
from shardwise.smp.v1.process import state

if TYPE_CHECKING:
    from shardwise.smp.v1.optimizer_side import Side


def inner_optimizer(given: Any) -> Optimizer:
    """The torch optimizer in `given`, or it itself. Raises ModelError where there is none."""
    inner = given
    while not isinstance(inner, Optimizer):
        if not hasattr(inner, "optimizer"):
            raise ModelError(
                f"{type(given).__name__} is none of torch.optim's classes and holds none as its attribute optimizer; "
                "smp.DistributedOptimizer has nothing to put the distributed parameters into"
            )
        inner = inner.optimizer
    return inner


def class_with(before: type, kind: type) -> type:
    """A subclass of `kind` that looks for its methods in `before` first. Objects of `kind` can change to it, also where
    that is an abstract class: Python compares what the first base adds to an object, so only the lookup is turned."""
    metaclass: type = type(kind)

    class Looked(metaclass):  # type: ignore[valid-type,misc]
        def mro(cls) -> list[type]:
            return [cls, *(base for base in before.__mro__ if base is not object), *kind.__mro__]

    made: type = Looked(kind.__name__, (kind, before), {"__module__": kind.__module__})
    return made


class Numbering:
    """The numbers that an optimizer's parameters have on this rank; scripts put functions of theirs in the place."""

    __slots__ = ()  # nor what comes before a script's class: objects of it could not change theirs
    _smp: Side

    @property
    def redefined_params(self) -> bool:
        """Whether the groups hold this rank's elements in the place of the model's parameters."""
        return self._smp.parallel is not None

    def _param_id_to_index(self) -> dict[int, int]:
        return {id(parameter): number for number, (_, parameter) in enumerate(self._smp.numbered())}

    def param_name_to_index(self) -> dict[str, int]:
        """Name of a parameter that has elements here -> its number in the optimizer."""
        return {name: number for number, (name, _) in enumerate(self._smp.numbered()) if name}

    def _param_index_to_param_local(self) -> dict[int, nn.Parameter]:
        return {number: parameter for number, (_, parameter) in enumerate(self._smp.numbered())}


class OwnOptimizer(Numbering):
    """Comes before the object's own class."""

    __slots__ = ()

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """The object's own, on complete gradients. Collective."""
        self._smp.settle()
        if state.model is not None:
            state.model.release()
        value = super().step(*args, **kwargs)  # type: ignore[misc]
        self._smp.write_back()
        if state.model is not None:
            state.model.gather()
        return value

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """The object's own, and those of the distributed parameters."""
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]
        self._smp.zero(True)

    def local_state_dict(self, gather_if_shard: bool = True) -> dict[str, Any]:
        """The object's own state, with the key `_smp_is_partial`; gathered as that of torch's optimizers."""
        return local_state(self.orig_state_dict(), gather_if_shard)

    def orig_state_dict(self) -> dict[str, Any]:
        """The object's own state."""
        found: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        return found

    def state_dict(self) -> dict[str, Any]:
        """The object's own; where that is the torch optimizer's, whole in the place of this rank's. Collective then."""
        found = self.orig_state_dict()
        known = self._smp.parallel is not None and {"state", "param_groups"} <= found.keys()
        return found | full_state(self._smp) if known else found

    def load_state_dict(self, state_dict: Mapping[str, Any], gather_if_shard: bool = True) -> None:
        """What `state_dict` or `local_state_dict` returned, by the object's own way."""
        super().load_state_dict(local_of(self._smp, state_dict))  # type: ignore[misc]
