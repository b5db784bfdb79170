"""Fake tensors of which each kind of operator is worked out once: a trace calls the same ones thousands of times.

torch's own cache of fake operators costs more than what it saves a step of many equal blocks. Here the key is made of
shapes, strides and dtypes alone, and outputs are made without asking torch again. What the key does not tell, outputs
that depend on values, operators that change sizes, and operators of others, is left to torch each time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

# No public name: torch documents FakeTensorMode only under its private module (torch 2.11 to 2.14).
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

UNKNOWN_TO_KEYS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
NAMESPACES = ("aten", "fsdp", "prims")
MAKES_CONSTANTS = ("lift", "lift_fresh", "_local_scalar_dense", "resize_storage_bytes_")  # by values, or their storage


UNKNOWN = -1


class _Output(NamedTuple):
    """The way to make an output anew.

    Attributes:
        argument: which of the flat arguments it is, or views; None of memory of its own.
        is_argument: it is that argument itself.
        attributes: of the fake tensor that torch has made.
    """

    argument: int | None = None
    is_argument: bool = False
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    offset: int = 0
    dtype: torch.dtype = torch.float32
    attributes: Mapping[str, Any] | None = None


class _Entry(NamedTuple):
    kind: type  # of the outputs together: list, tuple, or a tensor alone
    outputs: tuple[_Output | None, ...]


class RememberedFakeMode(FakeTensorMode):
    """A FakeTensorMode that remembers outputs by the metadata of arguments."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._entries: dict[tuple[Any, ...], _Entry | None] = {}  # None: torch is to be asked each time
        self._keyed: dict[Any, bool] = {}  # operators

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Work out an operator, or make its outputs as they were before."""
        kwargs = kwargs or {}
        key, tensors = self._key(func, args, kwargs)
        entry = self._entries.get(key)
        if entry is not None:
            return self._made_anew(entry, tensors)
        output = super().dispatch(func, types, args, kwargs)
        if key and key not in self._entries:
            after, _ = self._key(func, args, kwargs)
            self._entries[key] = _entry_of(func, output, tensors) if after == key else None
        return output

    def _key(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], list[FakeTensor]]:
        """Return (what tells a call's outputs, its tensors); nothing where nothing does."""
        keyed = self._keyed.get(func)
        if keyed is None:
            keyed = self._keyed[func] = _is_told_by_keys(func)
        parts: list[Any] = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
        tensors: list[FakeTensor] = []
        if not keyed or not self._tell((*args, *kwargs, *kwargs.values()), parts, tensors):
            return (), []
        key = tuple(parts)
        try:
            hash(key)
        except TypeError:  # an argument that has no hash
            return (), []
        return key, tensors

    def _tell(self, values: Any, parts: list[Any], tensors: list[FakeTensor]) -> bool:
        for value in values:
            if isinstance(value, FakeTensor):
                if value.constant is not None or value.layout is not torch.strided or value.fake_mode is not self:
                    return False
                parts += (value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device)
                parts.append(value.is_conj() or value.is_neg())
                tensors.append(value)
            elif isinstance(value, Tensor):
                return False
            elif isinstance(value, list | tuple):
                parts += (type(value), len(value))
                if not self._tell(value, parts, tensors):
                    return False
            else:
                parts += (type(value), value)  # 1 and 1.0 are equal, and differ in what dtype they give
        return True

    def _made_anew(self, entry: _Entry, tensors: list[FakeTensor]) -> Any:
        outputs = [output and self._output(output, tensors) for output in entry.outputs]
        return entry.kind(outputs) if entry.kind in (list, tuple) else outputs[0]

    def _output(self, output: _Output, tensors: list[FakeTensor]) -> Tensor:
        if output.is_argument and output.argument is not None:
            return tensors[output.argument]
        with torch._C._DisableTorchDispatch():
            if output.argument is None:
                plain = torch.empty_strided(output.shape, output.stride, dtype=output.dtype, device="meta")
            else:
                plain = torch.empty(0, dtype=output.dtype, device="meta")
                storage = tensors[output.argument].untyped_storage()
                plain.set_(storage, output.offset, output.shape, output.stride)  # type: ignore[call-overload]
        assert output.attributes is not None
        return _fake(plain, output.attributes)


def _fake(plain: Tensor, attributes: Mapping[str, Any]) -> Tensor:
    """Return a fake tensor, as torch makes them, with the attributes of one that it has made."""
    device = attributes.get("_fake_device") or attributes["fake_device"]  # torch 2.11's name
    fake = Tensor._make_subclass(FakeTensor, plain, False, dispatch_device=True, device_for_backend_keys=device)
    torch._C._set_warn_deprecated_on_mutable_data_ptr(fake)
    fake.__dict__.update(attributes)
    return fake


def _is_told_by_keys(func: Any) -> bool:
    known = func.namespace in NAMESPACES and func._opname not in MAKES_CONSTANTS
    return known and UNKNOWN_TO_KEYS.isdisjoint(func.tags)


def _entry_of(func: Any, output: Any, tensors: list[FakeTensor]) -> _Entry | None:
    """Return how an output is made of flat arguments; None where that is not known."""
    if output is not None and type(output) not in (list, tuple, FakeTensor):
        return None
    values = output if isinstance(output, list | tuple) else (output,)
    made = [None if value is None else _output_of(func, value, tensors) for value in values]
    if any(one is not None and one.argument == UNKNOWN for one in made):
        return None
    own = [value for value, one in zip(values, made, strict=True) if one is not None and one.argument is None]
    if len({value.untyped_storage()._cdata for value in own}) < len(own):  # they share new memory
        return None
    return _Entry(type(output), tuple(made))


def _output_of(func: Any, output: Any, tensors: list[FakeTensor]) -> _Output:
    for index, tensor in enumerate(tensors):
        if tensor is output:
            return _Output(index, True)
    if not isinstance(output, FakeTensor) or output.layout is not torch.strided or output.constant is not None:
        return _Output(UNKNOWN)
    if output.requires_grad or output.is_conj() or output.is_neg():
        return _Output(UNKNOWN)
    shape, stride, offset = tuple(output.shape), output.stride(), int(output.storage_offset())
    return _Output(_source(func, output, tensors), False, shape, stride, offset, output.dtype, dict(vars(output)))


def _source(func: Any, output: FakeTensor, tensors: list[FakeTensor]) -> int | None:
    """Return the argument whose memory an output has; None of memory of its own."""
    storage = output.untyped_storage()
    sources = [index for index, tensor in enumerate(tensors) if tensor.untyped_storage()._cdata == storage._cdata]
    if not sources:
        extent = 1 + sum((length - 1) * step for length, step in zip(output.shape, output.stride(), strict=True))
        size = extent * output.element_size() if output.numel() else 0
        return None if storage.nbytes() == size and output.storage_offset() == 0 else UNKNOWN
    return sources[0] if func.is_view or len(sources) == 1 else UNKNOWN
