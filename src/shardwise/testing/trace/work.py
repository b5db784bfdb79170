"""The work of an operator on an accelerator: a matrix product, attention, or bytes that are read and written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardwise._torch_compat.simulated import written_arguments
from shardwise._torch_compat.tracing import tree_leaves

Kind = tuple[str | int, ...]
# What changes no memory: views that torch does not call so, and memory that nothing is written to.
WITHOUT_KERNEL = {
    "_unsafe_view", "_reshape_alias", "alias", "detach", "empty", "empty_like", "empty_strided", "lift_fresh",
    "new_empty", "new_empty_strided", "resize_", "set_",
}  # fmt: skip
PRODUCTS = {"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1, "_grouped_mm": 0, "_scaled_mm": 0}  # -> its first operand
FUSED = "_scaled_dot_product_flash_attention"
ATTENTION = {
    f"{name}{backward}": 2.5 if backward else 1.0
    for name in (FUSED, f"{FUSED}_for_cpu", "_scaled_dot_product_efficient_attention")
    for backward in ("", "_backward")
}
BYTES: Kind = ("bytes",)
OVERWRITES = {"copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_", "normal_", "uniform_", "random_"}
PICKED = {"gather", "index", "index_select", "embedding"}  # read as much of their first argument as comes out
PUT = {"scatter_", "scatter_add_", "index_put_", "_index_put_impl_", "index_add_", "index_copy_"}


def work_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> tuple[Kind, int] | None:
    """Return (kind of work, how much of it); None where no kernel is launched."""
    name = func._opname
    if func.is_view or name in WITHOUT_KERNEL or func.namespace == "prim":
        return None
    if name in PRODUCTS:
        return _product(args[PRODUCTS[name]], args[PRODUCTS[name] + 1], output)
    if name in ATTENTION:
        return _attention(func, args, kwargs)
    given: dict[int | str, Any] = dict([*enumerate(args), *kwargs.items()])
    if name in PICKED or name in PUT:
        return BYTES, _at_places(name, given, output)
    places = written_arguments(func)
    # What is written in place is read too, unless it is overwritten; what is named `out` never is.
    read = [arg for place, arg in given.items() if place not in places or (place == 0 and name not in OVERWRITES)]
    written = [arg for place, arg in given.items() if place in places] if output is None else output
    return BYTES, _bytes(read) + _bytes(written)


def _at_places(name: str, given: Mapping[int | str, Any], output: Any) -> int:
    """Return the bytes of an operator that reads, or adds to, a few places of its first argument."""
    others = [arg for place, arg in given.items() if place != 0]
    if name in PICKED:
        return _bytes(others) + 2 * _bytes(output)
    values = max((_moved(leaf) for leaf in tree_leaves(others) if isinstance(leaf, Tensor)), default=0)
    return _bytes(others) + 2 * values


def _bytes(values: Any) -> int:
    return sum(_moved(leaf) for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


def _product(left: Tensor, right: Tensor, output: Tensor) -> tuple[Kind, int]:
    k, n = left.shape[-1], right.shape[-1]
    m = output.numel() // max(1, output.shape[-1])
    if output.dim() == 3:  # as many products as the first dim
        return ("product", m // max(1, output.shape[0]), n, k), output.shape[0]
    return ("product", m, n, k), 1


def _attention(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Kind, int]:
    """Return (flops in thousands, positions, size of a head) of flash attention; a causal triangle is half of them."""
    name = func._opname
    query, key = (args[1], args[2]) if "backward" in name else (args[0], args[1])
    batch, heads, length, size = query.shape
    place, given = next((n, arg) for n, arg in enumerate(func._schema.arguments) if arg.name == "is_causal")
    causal = args[place] if place < len(args) else kwargs.get(given.name, given.default_value)
    flops = 4 * batch * heads * length * key.shape[2] * size * ATTENTION[name] / (2 if causal else 1)
    return ("attention", round(flops / 1000), key.shape[2], size), 1


def _moved(tensor: Tensor) -> int:
    """Return a tensor's bytes, of an expanded one those that there are."""
    size = tensor.nbytes
    return size if tensor.layout is not torch.strided else min(size, tensor.untyped_storage().nbytes())


def grouped_shape(
    left: Tensor, right: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> tuple[int, ...]:
    """Return the shape of a grouped product: `offs` cuts the dimension that is not there thrice."""
    if left.dim() == right.dim() == 2:
        assert offs is not None
        return (offs.shape[0], left.shape[0], right.shape[1])
    if left.dim() == 2:
        return (left.shape[0], right.shape[2])
    return (left.shape[1], right.shape[1]) if right.dim() == 2 else (left.shape[0], left.shape[1], right.shape[2])
