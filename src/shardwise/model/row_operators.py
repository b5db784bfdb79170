"""Tells which of torch's operators treat the positions of sequences one by one, by the sizes of their dims.

A forward runs on fake tensors, where a rank's rows of a sequence are of a length that divides no other size. An
operator that is not known to keep these rows apart is taken to mix them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise._torch_compat.tracing import TorchDispatchMode, tree_leaves

# Another form of the same numbers.
FORMS = {
    "view", "_unsafe_view", "reshape", "_reshape_alias", "expand", "permute", "transpose", "t", "unsqueeze", "squeeze",
    "clone", "detach", "alias", "_to_copy", "copy_", "lift_fresh", "view_as_real", "view_as_complex", "_conj",
}  # fmt: skip
POINTWISE = {"masked_fill", "masked_fill_", "where", "add_", "sub_", "mul_", "div_", "clamp_"}
CONSTANTS = {
    "zeros", "ones", "full", "empty", "empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros",
    "new_ones", "new_full", "new_empty_strided", "empty_strided", "fill_", "zero_",
}  # fmt: skip
# Work along the dims that they are given.
ALONG_DIMS = {
    "sum", "mean", "amax", "amin", "var", "std", "var_mean", "_softmax", "_log_softmax", "logsumexp", "cumsum",
    "cumprod", "topk", "sort", "argsort", "argmax", "argmin", "max", "min", "norm", "linalg_vector_norm", "all", "any",
    "prod", "gather", "scatter", "scatter_", "scatter_add", "scatter_add_", "index_select", "slice", "select", "split",
    "split_with_sizes", "unbind", "cat", "stack", "glu", "roll", "flip", "unsafe_split",
}  # fmt: skip
PRODUCTS = {"mm": 0, "bmm": 0, "mv": 0, "addmm": 1, "baddbmm": 1, "_addmm_activation": 1}  # -> place of the left factor
FILLS = {"full", "full_like", "new_full", "fill_"}
SCALARS = {"other", "alpha", "value", "fill_value", "exponent", "min", "max", "self"}  # arguments that are numbers
NORMS = {"native_layer_norm", "_fused_rms_norm"}
DROPOUTS = {"native_dropout", "bernoulli", "bernoulli_", "uniform_"}


class MixedRowsError(Exception):
    """An operator that is not known to keep rows apart; the message is its name."""


class RowsApart(TorchDispatchMode):
    """Refuses operators that are not known to keep apart the rows of a part of a sequence.

    Args:
        lengths: of parts; a dim that one of them divides holds rows.

    Attributes:
        trusted: above 0 while what runs is known to be right.
        numbers: that operators were given beside tensors of rows: one that depends on the length is not a whole one's.
    """

    def __init__(self, lengths: Collection[int]) -> None:
        super().__init__()
        self.lengths, self.trusted = lengths, 0
        self.numbers: list[tuple[str, tuple[float, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.trusted:
            return func(*args, **kwargs)
        before = [tuple(leaf.shape) for leaf in tree_leaves([args, kwargs]) if isinstance(leaf, Tensor)]
        result = func(*args, **kwargs)
        after = [tuple(leaf.shape) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if (
            after
            and any(map(self.rows_of, (*before, *after)))
            and not self._keeps_apart(func, args, kwargs, before, after)
        ):
            raise MixedRowsError(func._schema.name.partition("::")[2])
        if after and any(map(self.rows_of, after)):
            self._note_numbers(func, args, kwargs)
        return result

    def _note_numbers(self, func: Any, args: Any, kwargs: Any) -> None:
        name = func._schema.name.partition("::")[2]
        if torch.Tag.pointwise in func.tags or name in POINTWISE or name in FILLS:
            given = _arguments(func, args, kwargs).items()
            numbers = tuple(float(value) for key, value in given if key in SCALARS and isinstance(value, int | float))
            self.numbers.append((name, numbers))

    def rows_of(self, shape: Sequence[int]) -> list[int]:
        """Return the dims that hold rows."""
        return [dim for dim, size in enumerate(shape) if size and any(size % length == 0 for length in self.lengths)]

    def _keeps_apart(self, func: Any, args: Any, kwargs: Any, before: list[Any], after: list[Any]) -> bool:
        name = func._schema.name.partition("::")[2]
        if any(len(self.rows_of(shape)) > 1 for shape in after):
            return False
        if not any(map(self.rows_of, before)):  # numbers of positions, or the first of a table, are none of rows
            return name in CONSTANTS or name == "expand"
        if name in CONSTANTS or name in POINTWISE or torch.Tag.pointwise in func.tags:
            return True
        given = _arguments(func, args, kwargs)
        if name in FORMS:
            return name not in ("view", "_unsafe_view", "reshape") or self._keeps_order(before[0], after[0])
        if name in DROPOUTS:
            return self.rows_of(before[0]) == [len(before[0]) - 2] and len(before[0]) in (2, 3)
        if name in PRODUCTS:
            return not self.rows_of(before[PRODUCTS[name]][-1:])
        if name in NORMS:
            return not self.rows_of(given["normalized_shape"])
        if name == "embedding":
            return not self.rows_of(before[0])
        if name == "repeat":
            return self._repeats_others(before[0], given["repeats"])
        return name in ALONG_DIMS and self._is_along_others(name, given, before, after)

    def _keeps_order(self, before: Sequence[int], after: Sequence[int]) -> bool:
        """Tell whether a view leaves rows in their order: where they are a dim of their own, behind as many others."""
        own = [[dim for dim, size in enumerate(shape) if size in self.lengths] for shape in (before, after)]
        if not all(own):
            return True
        ahead = [torch.Size(shape[: dims[0]]).numel() for shape, dims in zip((before, after), own, strict=True)]
        return ahead[0] == ahead[1]

    def _repeats_others(self, shape: Sequence[int], repeats: Sequence[int]) -> bool:
        offset = len(repeats) - len(shape)
        return all(repeats[dim + offset] == 1 for dim in self.rows_of(shape))

    def _is_along_others(self, name: str, given: dict[str, Any], before: list[Any], after: list[Any]) -> bool:
        """Tell whether the dims along which an operator works hold no rows; a slice of all is no work."""
        if name == "slice" and before[0] == after[0]:
            return True
        dims = given.get("dim", given.get("dims"))
        if dims is None:
            return False
        if name == "stack":
            return True
        dims = [dims] if isinstance(dims, int) else list(dims)
        return bool(dims) and not any(
            dim % len(shape) in self.rows_of(shape) for shape in before if shape for dim in dims
        )


def _arguments(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call by name, defaults included."""
    given = {argument.name: argument.default_value for argument in func._schema.arguments}
    given |= {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
    return given | kwargs
