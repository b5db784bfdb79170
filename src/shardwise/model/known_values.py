"""A mode in which fake tensors that follow from the code alone have values: masks of ones, ranges, constants.

A forward that reads one, `mask.any().item()` say, would else not run on fake tensors. What follows from weights, from
the batch or from random numbers stays unknown. Values are computed when they are read.

Of transformers' models more is assumed, so that their structure shows: a router chooses its experts by turns, another
unknown condition holds in all places (each expert has tokens), and the batch may have values that the caller gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
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
COPIES = {"_pin_memory"}  # that only an accelerator's host can make
FILLS = {"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"}  # of an argument the shape counts
# Whose result has as many elements as a condition holds; nonzero and masks as an index.
CONDITIONAL = {torch.ops.aten.nonzero.default, torch.ops.aten.masked_select.default, torch.ops.aten.index.Tensor}
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

    Args:
        assumes: take an unknown condition to hold everywhere, where the shape of a result follows from it, and the
            largest of unknown numbers to be other ones in each row.
    """

    def __init__(self, assumes: bool = False) -> None:
        super().__init__()
        self.assumes = assumes
        self._origins = WeakTensorKeyDictionary()
        self._views = WeakTensorKeyDictionary()  # tensor -> the operator that made it a view of its first argument
        self._lists = _ListsRead()

    def __enter__(self) -> Self:
        self._lists.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)
        self._lists.__exit__(*failure)

    def assume(self, tensor: Tensor, value: Callable[[], Tensor]) -> None:
        """Take a fake tensor to hold what `value` returns, which is called when that is read."""
        self._origins[tensor] = _Origin(value, (), {}, 0)

    def forget(self, tensors: Iterable[Tensor]) -> None:
        """Take what these fake tensors hold, and all that share their memory, for unknown."""
        memory = {storage_key(tensor) for tensor in tensors}
        for tensor in list(self._origins):
            if storage_key(tensor) in memory:
                del self._origins[tensor]

    def value_of(self, tensor: Tensor) -> Tensor | None:
        """Return what a fake tensor holds, on the CPU; None where that is unknown."""
        try:
            return self._value(tensor)
        except _UnknownError:
            return None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator; where its result or its sizes follow from known values, with these."""
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            self._write(func, args, kwargs)
            return func(*args, **kwargs)
        if not self._is_known(func, args, kwargs):
            if self.assumes and func is torch.ops.aten.topk.default:
                return self._by_turns(func(*args, **kwargs), *args[:3:2])
            return self._everywhere(func, args) if self.assumes and func in CONDITIONAL else func(*args, **kwargs)
        if BY_VALUE.intersection(func.tags):
            try:
                values = self._computed(_Origin(func, args, kwargs, 0))
            except _UnknownError:
                return func(*args, **kwargs)
            device = args[0].device
            return tree_map(lambda value: self._constant(value, device) if isinstance(value, Tensor) else value, values)
        outputs = func(*args, **kwargs)
        for number, output in enumerate(tree_leaves(outputs)):
            if isinstance(output, FakeTensor):
                self._origins[output] = _Origin(func, args, kwargs, number)
                if func.is_view:
                    self._views[output] = self._origins[output]
        return outputs

    def _by_turns(self, outputs: tuple[Tensor, Tensor], of: Tensor, dim: int = -1) -> tuple[Tensor, Tensor]:
        """Return `topk`'s outputs, with indices that choose each column by turns, where there are rows enough for that.

        A loop over experts that skips those without tokens then shows all.
        """
        indices = outputs[1]
        if of.dim() > 1 and dim % of.dim() == of.dim() - 1 and indices.numel() >= of.shape[-1]:
            shape, columns = indices.shape, of.shape[-1]
            self.assume(indices, lambda: (torch.arange(shape.numel()) % columns).reshape(shape))
        return outputs

    def _everywhere(self, func: Any, args: Any) -> Any:
        """Run an operator of CONDITIONAL with a condition that holds in all places, as far as it is unknown."""
        constant = partial(self._constant, device=args[0].device)
        if func is torch.ops.aten.nonzero.default:
            return constant(self._places(args[0])[0])
        if func is torch.ops.aten.masked_select.default:
            values, condition = torch.broadcast_tensors(*args)
            return torch.ops.aten.index.Tensor(values, list(map(constant, self._places(condition)[1])))
        places: list[Tensor | None] = []
        for index in args[1]:
            is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
            places += map(constant, self._places(index)[1]) if is_mask else [index]
        return func(args[0], places)

    def _places(self, condition: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """Return the indices [N, dims] of the places where a condition holds, and those of each dim."""
        value = self.value_of(condition)
        with dispatch_modes_off():
            places = (torch.ones(condition.shape, dtype=torch.bool) if value is None else value).nonzero()
            return places, places.unbind(1)

    def _is_known(self, func: Any, args: Any, kwargs: Any) -> bool:
        if torch.Tag.nondeterministic_seeded in func.tags or func._opname in WITHOUT_VALUES:
            return False
        if func._opname in FILLS | CONSTANTS:
            return True
        tensors = (leaf for leaf in tree_leaves([args, kwargs]) if isinstance(leaf, Tensor))
        return all(tensor in self._origins for tensor in tensors)

    def _write(self, func: Any, args: Any, kwargs: Any) -> None:
        """Learn what an operator writes, and what that is a view of; other views of it are unknown from here on."""
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | dict(kwargs)
        outputs = (argument.name for argument in func._schema.arguments if argument.is_write)
        written = [leaf for name in outputs for leaf in tree_leaves(given.get(name)) if isinstance(leaf, Tensor)]
        after = self._after_write(func, args, kwargs) if len(written) == 1 else []
        self.forget(written)
        for tensor, value in after:
            self._remember(tensor, value)

    def _after_write(self, func: Any, args: Any, kwargs: Any) -> list[tuple[Tensor, Tensor]]:
        """Return what the first argument holds afterwards, and what it is a view of; nothing where that is unknown."""
        if not args or not self._is_known(func, args, kwargs):
            return []
        tensors, views = [args[0]], list[_Origin]()  # from the whole to what is written
        while (view := self._views.get(tensors[0])) is not None and view.args[0] in self._origins:
            tensors, views = [view.args[0], *tensors], [view, *views]
        try:
            values = [self._computed(_Origin(torch.clone, (tensors[0],), {}, 0))]
            for view in views:
                values.append(tree_leaves(self._applied(view, values[-1]))[view.number])
            self._applied(_Origin(func, args, kwargs, 0), values[-1])
        except _UnknownError:
            return []
        return list(zip(tensors, values, strict=True))

    def _applied(self, origin: _Origin, first: Tensor) -> Any:
        """Return what an operator gives for `first` in the place of its first argument."""
        return self._computed(origin._replace(func=lambda _, *rest, **more: origin.func(first, *rest, **more)))

    def _computed(self, origin: _Origin) -> Any:
        """Return what an operator gives for values on the CPU.

        Raises:
            _UnknownError: an argument is unknown.
        """
        operator = getattr(origin.func, "_opname", "")
        value = _blank if operator in FILLS else _unchanged if operator in CONSTANTS else self._value
        arguments = (origin.args, dict(origin.kwargs))
        args, kwargs = tree_map(lambda leaf: value(leaf) if isinstance(leaf, Tensor) else leaf, arguments)
        if operator in COPIES:
            return args[0]
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

    def _constant(self, value: Tensor, device: torch.device) -> Tensor:
        """Return a fake tensor of which `value` is known."""
        fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        self._remember(fake, value)
        return fake

    def _remember(self, tensor: Tensor, value: Tensor) -> None:
        self._origins[tensor] = _Origin(lambda: value, (), {}, 0)


class _ListsRead(TorchFunctionMode):
    """Let `torch.tensor` read the fake tensors of a list one by one, where it would reach for their memory."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.tensor and args and isinstance(args[0], (list, tuple)):
            args = (tree_map(lambda leaf: leaf.item() if isinstance(leaf, FakeTensor) else leaf, args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


def _blank(tensor: Tensor) -> Tensor:
    with dispatch_modes_off():
        return torch.empty(tensor.shape, dtype=tensor.dtype)


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor
