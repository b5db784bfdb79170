"""Tensors inside of nested containers: mapped, cut into microbatches, put together again, and sent to other ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.smp.v1.exceptions import SMPValidationError


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """`value` with everything in its lists, tuples, sets and mappings (Hugging Face outputs too) led through."""
    if isinstance(value, Mapping):
        return _like(value, {key: map_leaves(function, item) for key, item in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_leaves(function, item) for item in value))
    if isinstance(value, (list, tuple, set)):
        return type(value)(map_leaves(function, item) for item in value)
    return function(value)


def leaves(value: Any) -> list[Any]:
    """Everything in the containers of `value`."""
    found: list[Any] = []
    map_leaves(lambda leaf: found.append(leaf), value if not isinstance(value, set) else list(value))
    return found


def tensors(value: Any) -> list[Tensor]:
    """The tensors in the containers of `value`."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]


def form(argument: Any) -> Any:
    """What of a step's argument may change what the model is called with: shapes, and values that are no objects."""
    if isinstance(argument, Tensor):
        return tuple(argument.shape)
    return argument if isinstance(argument, (bool, int, float, str)) else None


def _like(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(mapping) is dict:
        return items
    try:
        return type(mapping)(**items)  # transformers' outputs
    except TypeError:
        return type(mapping)(items)  # type: ignore[call-arg]


def to_device(value: Any, device: torch.device) -> Any:
    """`value` with its tensors on `device`."""
    return map_leaves(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, value)


def splits(value: Any) -> bool:
    """Whether a step cuts `value`: it holds tensors, or objects with a method `smp_slice`."""
    return any(isinstance(leaf, Tensor) or hasattr(leaf, "smp_slice") for leaf in leaves(value))


def piece(value: Any, name: str, count: int, index: int, axis: int) -> Any:
    """Microbatch `index` of `count` of what `value` holds, along `axis`.

    Raises:
        SMPValidationError: the batch does not divide.
    """

    def cut(leaf: Any) -> Any:
        if hasattr(leaf, "smp_slice"):
            return leaf.smp_slice(count, index, axis)
        if not isinstance(leaf, Tensor) or leaf.dim() == 0:
            return leaf
        rows = leaf.shape[axis]
        if rows % count:
            raise SMPValidationError(
                f"microbatches={count} does not divide the {rows} rows of {name!r} (axis {axis}); use a batch size "
                f"that is a multiple of {count}, another number of microbatches, or non_split_inputs=[{name!r}]"
            )
        return leaf.narrow(axis, index * (rows // count), rows // count)

    return map_leaves(cut, value)


@dataclass(frozen=True)
class _Place:
    """Stands for a tensor while the rest is sent."""

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def share(value: Any, source: int, group: dist.ProcessGroup, device: torch.device) -> Any:
    """What rank `source` of the job has, on all ranks of `group`; others' `value` is not looked at. Collective."""
    tensors: list[Tensor] = []

    def place(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        tensors.append(leaf.detach())
        return _Place(len(tensors) - 1, tuple(leaf.shape), leaf.dtype)

    mine = dist.get_rank() == source
    box = [map_leaves(place, value) if mine else None]
    dist.broadcast_object_list(box, source, group=group, device=torch.device("cpu"))

    def fill(leaf: Any) -> Any:
        if not isinstance(leaf, _Place):
            return leaf
        empty = torch.empty(leaf.shape, dtype=leaf.dtype, device=device)
        tensor = tensors[leaf.index].to(device).contiguous() if mine else empty
        dist.broadcast(tensor, source, group=group)
        return tensor

    return map_leaves(fill, box[0])


class StepOutput:
    """One tensor that a step returned, of every microbatch.

    Attributes:
        outputs: by microbatch.
    """

    def __init__(self, outputs: Sequence[Tensor]) -> None:
        self.outputs = list(outputs)

    def reduce_mean(self) -> Tensor:
        """Mean over microbatches; of whole numbers in torch's default dtype."""
        stacked = torch.stack(self.outputs)
        return stacked.mean(0, dtype=None if stacked.is_floating_point() else torch.get_default_dtype())

    def reduce_sum(self) -> Tensor:
        """Sum over microbatches."""
        return torch.stack(self.outputs).sum(0)

    def concat(self) -> Tensor:
        """All microbatches along the batch axis, 0; scalars side by side."""
        return torch.stack(self.outputs) if self.outputs[0].dim() == 0 else torch.cat(self.outputs)

    def stack(self) -> Tensor:
        """All microbatches along a new axis, 0."""
        return torch.stack(self.outputs)

    def detach(self) -> StepOutput:
        """The same without autograd's graph."""
        return StepOutput([output.detach() for output in self.outputs])

    def __repr__(self) -> str:
        return f"StepOutput({self.outputs!r})"


def collect(results: Sequence[Any], detach: bool) -> Any:
    """What a step returns from its body's results: tensors as StepOutputs, other values as lists."""
    first = results[0]
    if isinstance(first, Tensor):
        return StepOutput([result.detach() if detach else result for result in results])
    if isinstance(first, Mapping):
        return _like(first, {key: collect([result[key] for result in results], detach) for key in first})
    if isinstance(first, (list, tuple)):
        parts = [collect(items, detach) for items in zip(*results, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    return None if all(result is None for result in results) else list(results)
