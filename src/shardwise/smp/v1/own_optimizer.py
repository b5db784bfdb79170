"""Optimizers that are none of torch's: scripts of 2021 and 2022 wrap theirs in a class of their own, for 16 bits.

What such an object has stays its own: attributes, step, state. It gains the numbers of its parameters, by which such
scripts save, and finds gradients that are complete. Its parameters are those of the torch optimizer inside of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from shardwise.errors import CheckpointError
from shardwise.smp.v1.optimizer_binding import OptimizerBinding
from shardwise.smp.v1.optimizer_state import local_optimizer_state


def subclass_with(before: type, cls: type) -> type:
    """Return a subclass of `cls` that looks for its methods in `before` first.

    Objects of `cls` can change to it, also where that is an abstract class: Python compares what the first base adds to
    an object, so only the lookup is turned.
    """
    metaclass: type = type(cls)

    class BeforeFirst(metaclass):  # type: ignore[valid-type,misc]
        def mro(self) -> list[type]:
            return [self, *(base for base in before.__mro__ if base is not object), *cls.__mro__]

    subclass: type = BeforeFirst(cls.__name__, (cls, before), {"__module__": cls.__module__})
    return subclass


class ParameterNumbers:
    """The numbers that an optimizer's parameters have on this rank; scripts put functions of theirs in the place."""

    __slots__ = ()  # nor what comes before a script's class: objects of it could not change theirs
    _smp: OptimizerBinding

    @property
    def redefined_params(self) -> bool:
        """True once the groups hold this rank's elements in the place of the model's parameters."""
        return self._smp.parallel is not None

    def _param_id_to_index(self) -> dict[int, int]:
        return {id(parameter): number for number, (_, parameter) in enumerate(self._smp.parameters.numbered())}

    def param_name_to_index(self) -> dict[str, int]:
        """Name of a parameter that has elements here -> its number in the optimizer."""
        return {name: number for number, (name, _) in enumerate(self._smp.parameters.numbered()) if name}

    def _param_index_to_param_local(self) -> dict[int, nn.Parameter]:
        return {number: parameter for number, (_, parameter) in enumerate(self._smp.parameters.numbered())}


class OwnOptimizer(ParameterNumbers):
    """Comes before the object's own class."""

    __slots__ = ()

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the object's own step on complete gradients. Collective."""
        self._smp.settle()
        self._smp.release_weights()
        value = super().step(*args, **kwargs)  # type: ignore[misc]
        self._smp.parameters.write_back()
        self._smp.gather_weights()
        return value

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Zero the object's own gradients, and those of the distributed parameters."""
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]
        self._smp.zero(True)

    def local_state_dict(self, gather_if_shard: bool = True) -> dict[str, Any]:
        """Return the object's own state, with the key `_smp_is_partial`; gathered as that of torch's optimizers."""
        return local_optimizer_state(self._smp.session, self.orig_state_dict(), gather_if_shard)

    def orig_state_dict(self) -> dict[str, Any]:
        """Return the object's own state."""
        own: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        return own

    def state_dict(self) -> dict[str, Any]:
        """Return the object's own state; where that is the torch optimizer's, the whole one. Collective then."""
        own = self.orig_state_dict()
        is_torchs = self._smp.parallel is not None and {"state", "param_groups"} <= own.keys()
        return own | self._smp.whole_state() if is_torchs else own

    def load_state_dict(self, state_dict: Mapping[str, Any], gather_if_shard: bool = True) -> None:
        """Load what `state_dict` or `local_state_dict` returned, by the object's own way.

        Raises:
            CheckpointError: it is of other groups, or the object keeps none.
        """
        self.check_keeps_state()
        super().load_state_dict(self._smp.local_part_of(state_dict))  # type: ignore[misc]

    def check_keeps_state(self) -> None:
        """Raise CheckpointError where the object's class does not save and load what it keeps."""
        own = super()
        if not (hasattr(own, "state_dict") and hasattr(own, "load_state_dict")):
            raise CheckpointError(
                f"{type(self).__name__} has no state_dict and load_state_dict: what it keeps besides its torch "
                "optimizer would be lost; give it both"
            )
