"""Arguments of `smp.step` cut into microbatches, and what it returns: one StepOutput for each tensor of its body."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.smp.exceptions import SMPValidationError, StepUsageError
from shardwise.smp.nesting import map_leaves, mapping_like, tree_leaves


def argument_form(argument: Any) -> Any:
    """Return what of a step's argument may change the model's inputs: a shape, or a value that is no object."""
    if isinstance(argument, Tensor):
        return tuple(argument.shape)
    return argument if isinstance(argument, (bool, int, float, str)) else None


def is_split(value: Any) -> bool:
    """Tell if a step cuts `value`: it holds tensors, or objects with a method `smp_slice`."""
    return any(isinstance(leaf, Tensor) or hasattr(leaf, "smp_slice") for leaf in tree_leaves(value))


def microbatch_of(value: Any, name: str, count: int, index: int, axis: int) -> Any:
    """Return microbatch `index` of `count` of what `value` holds, along `axis`.

    Raises:
        SMPValidationError: the batch does not divide, or has no such axis.
    """

    def cut(leaf: Any) -> Any:
        if hasattr(leaf, "smp_slice"):
            return leaf.smp_slice(count, index, axis)
        if not isinstance(leaf, Tensor) or leaf.dim() == 0:
            return leaf
        if not -leaf.dim() <= axis < leaf.dim():
            raise SMPValidationError(
                f"input_split_axes: {name!r} is cut along axis {axis} and has a tensor of shape {list(leaf.shape)}; "
                "give an axis that it has"
            )
        rows = leaf.shape[axis]
        if rows % count:
            raise SMPValidationError(
                f"microbatches={count} does not divide the {rows} rows of {name!r} (axis {axis}); use a batch size "
                f"that is a multiple of {count}, another number of microbatches, or non_split_inputs=[{name!r}]"
            )
        return leaf.narrow(axis, index * (rows // count), rows // count)

    return map_leaves(cut, value)


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


def collect_outputs(results: Sequence[Any], detach: bool) -> Any:
    """Return a step's outputs from its body's results: tensors as StepOutputs, other values as lists.

    Raises:
        StepUsageError: the results of the microbatches have different parts.
    """
    first = results[0]
    for index, other in enumerate(results):
        if _parts(other) != _parts(first):
            raise StepUsageError(
                f"the step returns {_parts(first)} for microbatch 0 and {_parts(other)} for microbatch {index}; return "
                "the same parts for each"
            )
    if isinstance(first, Tensor):
        return StepOutput([result.detach() if detach else result for result in results])
    if isinstance(first, Mapping):
        return mapping_like(first, {key: collect_outputs([result[key] for result in results], detach) for key in first})
    if isinstance(first, (list, tuple)):
        parts = [collect_outputs(items, detach) for items in zip(*results, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    return None if all(result is None for result in results) else list(results)


def _parts(result: Any) -> str:
    """Say what a result consists of, where its parts are put together one by one; "a value" of any other."""
    if isinstance(result, Tensor):
        return "a tensor"
    if isinstance(result, Mapping):
        return f"a mapping of {sorted(map(str, result))}"
    return f"{len(result)} values" if isinstance(result, (list, tuple)) else "a value"
