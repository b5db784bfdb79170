"""Matrix products and attention of 16 bits on a processor that has no instructions for them.

Torch multiplies them one by one there, forty times as slowly as fp32: a script of a GPU seems to hang. Inside of
`wide_products` torch's own kernels get fp32 copies of their 16-bit inputs and the result is rounded once, which is what
the instructions do too: factors of 16 bits, sums in fp32. On other processors, and on a GPU, nothing changes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shardwise.precision import DTYPES, multiplies

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm")
INTO = {  # the same, into a tensor that is there
    "mm.out": "mm", "addmm.out": "addmm", "addmm_": "addmm",
    "bmm.out": "bmm", "baddbmm.out": "baddbmm", "baddbmm_": "baddbmm",
}  # fmt: skip
ATTENTION = ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward")
Kernel = Callable[..., Any]


@contextmanager
def wide_products(device_type: str, compute: str | None = None) -> Iterator[None]:
    """Products of `compute`, or of every 16-bit dtype where that is None, in fp32 where this processor has none.

    For the whole process, since an operator has one kernel. `compute`: as `precision.compute` has it.
    """
    dtypes = [DTYPES[name] for name in ("bf16", "fp16") if compute in (name, None) and not multiplies(DTYPES[name])]
    if device_type != "cpu" or not dtypes or _widened:
        yield
        return
    library = _replace(dtypes)
    _widened.extend(dtypes)
    try:
        yield
    finally:
        _widened.clear()
        del library  # which gives torch's own kernels back


_widened: list[torch.dtype] = []


def _replace(dtypes: Sequence[torch.dtype]) -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    kernels = {name: _in_fp32(name, dtypes) for name in (*PRODUCTS, *ATTENTION)}
    kernels |= {name: _into(name, kernels[product], dtypes) for name, product in INTO.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
        for name, kernel in kernels.items():
            library.impl(name, kernel, "CPU", with_keyset=True, allow_override=True)
    return library


def _in_fp32(name: str, dtypes: Sequence[torch.dtype]) -> Kernel:
    """Torch's kernel `name`, its 16-bit inputs widened and what it returns rounded; but for the logarithms of sums that
    attention keeps in fp32, whatever its inputs."""
    own = torch.library.get_kernel(f"aten::{name}", "CPU")

    def kernel(keys: Any, first: Tensor, *others: Any, **named: Any) -> Any:
        if first.dtype not in dtypes:
            return own.call_boxed(keys, first, *others, **named)
        given = [_wide(each, dtypes) for each in (first, *others)]
        found = own.call_boxed(keys, *given, **{key: _wide(value, dtypes) for key, value in named.items()})
        if name == ATTENTION[0]:
            return found[0].to(first.dtype), found[1]
        return found.to(first.dtype) if isinstance(found, Tensor) else tuple(each.to(first.dtype) for each in found)

    return kernel


def _into(name: str, product: Kernel, dtypes: Sequence[torch.dtype]) -> Kernel:
    own = torch.library.get_kernel(f"aten::{name}", "CPU")

    def kernel(keys: Any, first: Tensor, *others: Any, **named: Any) -> Any:
        if first.dtype not in dtypes:
            return own.call_boxed(keys, first, *others, **named)
        out = named.pop("out", first)
        return out.copy_(product(keys, first, *others, **named))

    return kernel


def _wide(value: Any, dtypes: Sequence[torch.dtype]) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in dtypes else value
