"""A mode in which fake tensors that follow from the code alone have values: masks of ones, ranges, constants.

A forward that reads one, `mask.any().item()` say, would else not run on fake tensors. What follows from weights, from
the batch or from random numbers stays unknown. Values are computed when they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from shardwise._torch_compat.tracing import (
    FakeTensor,
    TorchDispatchMode,
    dispatch_modes_off,
    tree_leaves,
    tree_map,
)
from shardwise._torch_compat.writes import storage_key

BY_VALUE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
WITHOUT_VALUES = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
CONSTANTS = {"lift", "lift_fresh"}  # of what `torch.tensor` was given
FILLS = {"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"}  # of an argument the shape counts
MOST_ELEMENTS = 2**24  # of a tensor that is computed to be read


class _Origin(NamedTuple):
    """The operator that made a tensor; `number` tells its outputs apart."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    number: int


class _UnknownError(Exception):
    """A value does not follow from the code alone, or is too large to be computed."""


class KnownValues(TorchDispatchMode):
    """Remember where fake tensors come from, and answer what is asked of them where that is the code alone.

    Enter it inside of a FakeTensorMode.
    """

    def __init__(self) -> None:
        super().__init__()
        self._origins = WeakTensorKeyDictionary()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator; where its result or its sizes follow from known values, with these."""
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            self._write(func, args, kwargs)
            return func(*args, **kwargs)
        if not self._is_known(func, args, kwargs):
            return func(*args, **kwargs)
        if BY_VALUE.intersection(func.tags):
            try:
                values = self._computed(_Origin(func, args, kwargs, 0))
            except _UnknownError:
                return func(*args, **kwargs)
            return tree_map(lambda value: self._constant(value) if isinstance(value, Tensor) else value, values)
        outputs = func(*args, **kwargs)
        for number, output in enumerate(tree_leaves(outputs)):
            if isinstance(output, FakeTensor):
                self._origins[output] = _Origin(func, args, kwargs, number)
        return outputs

    def _is_known(self, func: Any, args: Any, kwargs: Any) -> bool:
        if torch.Tag.nondeterministic_seeded in func.tags or func._opname in WITHOUT_VALUES:
            return False
        if func._opname in FILLS | CONSTANTS:
            return True
        tensors = (leaf for leaf in tree_leaves([args, kwargs]) if isinstance(leaf, Tensor))
        return all(tensor in self._origins for tensor in tensors)

    def _write(self, func: Any, args: Any, kwargs: Any) -> None:
        """Learn what an operator writes; what shares memory with it, a view say, is unknown from here on."""
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | dict(kwargs)
        outputs = (argument.name for argument in func._schema.arguments if argument.is_write)
        written = [leaf for name in outputs for leaf in tree_leaves(given.get(name)) if isinstance(leaf, Tensor)]
        after = self._after_write(func, args, kwargs) if len(written) == 1 else None
        memory = {storage_key(tensor) for tensor in written}
        for tensor in list(self._origins):
            if storage_key(tensor) in memory:
                del self._origins[tensor]
        if after is not None:
            self._remember(written[0], after)

    def _after_write(self, func: Any, args: Any, kwargs: Any) -> Tensor | None:
        """Return what the first argument holds afterwards; None where that is unknown."""
        if not args or not self._is_known(func, args, kwargs):
            return None
        try:
            copied = self._computed(_Origin(torch.clone, args[:1], {}, 0))
            self._computed(_Origin(lambda _, *rest, **more: func(copied, *rest, **more), args, kwargs, 0))
        except _UnknownError:
            return None
        return copied  # type: ignore[no-any-return]

    def _computed(self, origin: _Origin) -> Any:
        """Return what an operator gives for values on the CPU.

        Raises:
            _UnknownError: an argument is unknown.
        """
        operator = getattr(origin.func, "_opname", "")
        value = _blank if operator in FILLS else _unchanged if operator in CONSTANTS else self._value
        arguments = (origin.args, dict(origin.kwargs))
        args, kwargs = tree_map(lambda leaf: value(leaf) if isinstance(leaf, Tensor) else leaf, arguments)
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu")
        with dispatch_modes_off():
            return origin.func(*args, **kwargs)

    def _value(self, tensor: Tensor) -> Tensor:
        origin = self._origins.get(tensor)
        if origin is None or tensor.numel() > MOST_ELEMENTS:
            raise _UnknownError
        value: Tensor = tree_leaves(self._computed(origin))[origin.number]
        self._remember(tensor, value)  # what is used twice would be computed twice, at each of many levels
        return value

    def _constant(self, value: Tensor) -> Tensor:
        """Return a fake tensor of which `value` is known."""
        fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        self._remember(fake, value)
        return fake

    def _remember(self, tensor: Tensor, value: Tensor) -> None:
        self._origins[tensor] = _Origin(lambda: value, (), {}, 0)


def _blank(tensor: Tensor) -> Tensor:
    with dispatch_modes_off():
        return torch.empty(tensor.shape, dtype=tensor.dtype)


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor
