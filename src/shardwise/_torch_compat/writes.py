"""Operators that write, as a dispatch mode sees them, and functions of `torch.nn.init` that skip meta tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

IS_META = Tensor.is_meta.__get__  # type: ignore[attr-defined]


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


class SkippedFills(TorchFunctionMode):
    """Calls of functions of `torch.nn.init` that write nothing to a tensor on the meta device, such as `trunc_normal_`.

    No public name: such a function asks `is_meta` of the tensor and returns (torch 2.13 and 2.14); no operator runs.

    Args:
        fill: called with each tensor that would have been filled.
    """

    def __init__(self, fill: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.fill = fill

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func == IS_META and result:  # a new object at each access
            self.fill(args[0])
        return result
