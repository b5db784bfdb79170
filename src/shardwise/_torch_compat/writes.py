"""Operators that write, as a dispatch mode sees them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor


def storage_key(tensor: Tensor) -> int:
    """Return a number that tensors of one storage have in common, on the meta device too, while it lives."""
    # No public name: a storage on the meta device has no address (torch 2.11 to 2.14).
    return int(tensor.untyped_storage()._cdata)


def written_tensors(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the arguments that a call of `operator` writes."""
    # No public name: what an operator does to its arguments (torch 2.11 to 2.14).
    schema = operator._schema
    if not schema.is_mutable:
        return
    for number, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        values = value if isinstance(value, (list, tuple)) else [value]
        yield from (tensor for tensor in values if isinstance(tensor, Tensor))
