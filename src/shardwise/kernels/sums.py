"""Operators of 16 bits on a CPU that are summed in fp32, as a GPU does.

Torch's own kernels there add the gradients of layer norms, embeddings and indexed tables up in 16 bits: 7 % off after
2,048 rows. And a processor that has no instructions for matrix products of 16 bits multiplies them one by one, forty
times as slowly as fp32: a script of a GPU seems to hang. Inside of `fp32_sums` such operators get fp32 copies of their
16-bit inputs and what they return is rounded once. Nothing changes on a GPU, and products stay torch's own on a
processor with instructions for them: those sum in fp32 too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shardwise._torch_compat.operators import multiplies
from shardwise.kernels.operators import Kernel, replace_operators
from shardwise.kernels.precision import DTYPES

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm")
INTO = {  # the same, into a tensor that is there
    "mm.out": "mm", "addmm.out": "addmm", "addmm_": "addmm",
    "bmm.out": "bmm", "baddbmm.out": "baddbmm", "baddbmm_": "baddbmm",
}  # fmt: skip
ATTENTION = ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward")
NORM, EMBEDDING, INDEX = "native_layer_norm_backward", "embedding_dense_backward", "_index_put_impl_"


@contextmanager
def fp32_sums(device_type: str, compute: str | None = None) -> Iterator[None]:
    """Take sums of operators of `compute`, or of every 16-bit dtype where that is None, in fp32 on a CPU.

    For the whole process, since an operator has one kernel. `compute`: as `precision.compute` has it.
    """
    dtypes = [DTYPES[name] for name in ("bf16", "fp16") if compute in (name, None)]
    if device_type != "cpu" or not dtypes or _summed:
        yield
        return
    library = _replace(dtypes)
    _summed.extend(dtypes)
    try:
        yield
    finally:
        _summed.clear()
        del library  # which gives torch's own kernels back


_summed: list[torch.dtype] = []


def _replace(dtypes: Sequence[torch.dtype]) -> torch.library.Library:
    kernels = {NORM: _in_fp32(NORM, dtypes), EMBEDDING: _embedding(dtypes), INDEX: _index(dtypes)}
    slow = [dtype for dtype in dtypes if not multiplies(dtype)]
    if slow:
        kernels |= {name: _in_fp32(name, slow) for name in (*PRODUCTS, *ATTENTION)}
        kernels |= {name: _into(name, kernels[product], slow) for name, product in INTO.items()}
    return replace_operators(kernels)


def _in_fp32(name: str, dtypes: Sequence[torch.dtype]) -> Kernel:
    """Torch's kernel `name`, its 16-bit inputs widened and what it returns rounded."""
    own = torch.library.get_kernel(f"aten::{name}", "CPU")

    def kernel(keys: Any, first: Tensor, *others: Any, **named: Any) -> Any:
        if first.dtype not in dtypes:
            return own.call_boxed(keys, first, *others, **named)
        widened = [_wide(value, dtypes) for value in (first, *others)]
        result = own.call_boxed(keys, *widened, **{key: _wide(value, dtypes) for key, value in named.items()})
        if isinstance(result, Tensor):
            return result.to(first.dtype)
        outputs = zip(result, _results(name, first, others))
        return tuple(None if output is None else output.to(dtype) for output, dtype in outputs)

    return kernel


def _results(name: str, first: Tensor, others: Sequence[Any]) -> Sequence[torch.dtype]:
    """Dtypes of what the operator `name` returns.

    Of attention the logarithms of its sums too, fp32 whatever its inputs; of a norm the gradients of its input, weight
    and bias, of which the last two may be fp32 or missing.
    """
    if name == ATTENTION[0]:
        return first.dtype, torch.float32
    if name == NORM:
        return [first.dtype if tensor is None else tensor.dtype for tensor in (others[0], others[4], others[5])]
    return [first.dtype] * 3


def _into(name: str, product: Kernel, dtypes: Sequence[torch.dtype]) -> Kernel:
    own = torch.library.get_kernel(f"aten::{name}", "CPU")

    def kernel(keys: Any, first: Tensor, *others: Any, **named: Any) -> Any:
        if first.dtype not in dtypes:
            return own.call_boxed(keys, first, *others, **named)
        out = named.pop("out", first)
        return out.copy_(product(keys, first, *others, **named))

    return kernel


def _embedding(dtypes: Sequence[torch.dtype]) -> Kernel:
    """Return a kernel by `index_add_`, which sums in fp32 without a copy of the whole table."""
    own = torch.library.get_kernel(f"aten::{EMBEDDING}", "CPU")

    def kernel(keys: Any, gradient: Tensor, ids: Tensor, rows: int, padding: int, by_frequency: bool) -> Tensor:
        if gradient.dtype not in dtypes or by_frequency:
            return own.call_boxed(keys, gradient, ids, rows, padding, by_frequency)
        table = gradient.new_zeros(rows, gradient.shape[-1])
        table.index_add_(0, ids.reshape(-1), gradient.reshape(-1, gradient.shape[-1]))
        if padding >= 0:
            table[padding] = 0
        return table

    return kernel


def _index(dtypes: Sequence[torch.dtype]) -> Kernel:
    own = torch.library.get_kernel(f"aten::{INDEX}", "CPU")

    def kernel(keys: Any, table: Tensor, ids: Any, values: Tensor, add: bool = False, unsafe: bool = False) -> Tensor:
        if not add or table.dtype not in dtypes:
            return own.call_boxed(keys, table, ids, values, add, unsafe)
        return table.copy_(own.call_boxed(keys, table.float(), ids, values.float(), add, unsafe))

    return kernel


def _wide(value: Any, dtypes: Sequence[torch.dtype]) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in dtypes else value
