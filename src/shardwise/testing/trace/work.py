"""The work of an operator on an accelerator: a matrix product, attention, or bytes that are read and written."""

from __future__ import annotations

from collections.abc import Sequence
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
ATTENTION = {FUSED: 1.0, f"{FUSED}_backward": 2.5, f"{FUSED}_for_cpu": 1.0, f"{FUSED}_for_cpu_backward": 2.5}
BYTES: Kind = ("bytes",)


def work_of(func: Any, args: tuple[Any, ...], output: Any, tensors: Sequence[Tensor]) -> tuple[Kind, int] | None:
    """Return (kind of work, how much of it); None where no kernel is launched.

    Args:
        tensors: all that go in or come out.
    """
    name = func._opname
    if func.is_view or name in WITHOUT_KERNEL or func.namespace == "prim":
        return None
    if name in PRODUCTS:
        return _product(args[PRODUCTS[name]], args[PRODUCTS[name] + 1], output)
    if name in ATTENTION:
        return _attention(name, args)
    moved = sum(_moved(tensor) for tensor in tensors)
    if output is None:  # what is written in place is read too, and does not come out
        moved += sum(_moved(leaf) for leaf in tree_leaves(_written(func, args)) if isinstance(leaf, Tensor))
    return BYTES, moved


def _written(func: Any, args: tuple[Any, ...]) -> list[Any]:
    places = written_arguments(func)
    return [arg for place, arg in enumerate(args) if place in places]


def _product(left: Tensor, right: Tensor, output: Tensor) -> tuple[Kind, int]:
    k, n = left.shape[-1], right.shape[-1]
    m = output.numel() // max(1, output.shape[-1])
    if output.dim() == 3:  # as many products as the first dim
        return ("product", m // max(1, output.shape[0]), n, k), output.shape[0]
    return ("product", m, n, k), 1


def _attention(name: str, args: tuple[Any, ...]) -> tuple[Kind, int]:
    """Return (flops in thousands, positions, size of a head) of flash attention; a causal triangle is half of them."""
    backward = "backward" in name
    query, key = (args[1], args[2]) if backward else (args[0], args[1])
    batch, heads, length, size = query.shape
    causal = next((value for value in args if isinstance(value, bool)), False)
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
