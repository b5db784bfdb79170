"""fp32 matrix products on a CPU, by the quicker of the two libraries that torch has.

torch multiplies fp32 with MKL, whose kernels for AMD's processors stop at AVX2. oneDNN, which torch has for 16 bits,
uses AVX-512 where the processor has it: 5 to 25 % quicker on the shapes of a transformer
(docs/benchmarks/collectives.md). Inside of `quick_products` large products go there, forward and backward, whoever
asks for them. Results differ by rounding; equal shapes give equal bits. Intel's processors, for which MKL is written,
are left alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise._torch_compat.operators import onednn_linear
from shardwise.kernels.operators import Kernel, replace_operators

LEAST = 1 << 22  # multiplications of a product, 0.1 ms, from which on asking costs nothing that could be seen


@cache
def prefers_onednn() -> bool:
    """Return True if fp32 products are quicker by oneDNN: AMD's processors with AVX-512, where torch has both."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    has_avx512 = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return has_avx512 and onednn_linear is not None and "AuthenticAMD" in _processor()


@contextmanager
def quick_products(device_type: str, compute: str) -> Iterator[None]:
    """Run large fp32 products by oneDNN where that is quicker, in a job that computes in fp32 on a CPU.

    For the whole process, since an operator has one kernel. `compute`: as `precision.compute` has it.
    """
    if device_type != "cpu" or compute not in ("auto", "fp32") or not prefers_onednn():
        yield
        return
    library = replace_operators({name: _kernel(name) for name in ("mm", "mm.out", "addmm", "addmm.out")})
    try:
        yield
    finally:
        del library  # which gives torch's own kernels back


def _kernel(name: str) -> Kernel:
    """Return the kernel of `mm`, `addmm`, or of either as it writes into an `out` of the caller's."""
    own = torch.library.get_kernel(f"aten::{name}", "CPU")

    def kernel(keys: Any, *operands: Tensor, **options: Any) -> Tensor:
        *bias, left, right = operands
        if not (_worthwhile(left, right) and _fits(left, right, bias, **options)):
            product: Tensor = own.call_boxed(keys, *operands, **options)
            return product
        made: Tensor = onednn_linear.default(left, right.t(), bias[0] if bias else None, "none", [], "")
        return options["out"].copy_(made) if "out" in options else made

    return kernel


def _fits(
    left: Tensor, right: Tensor, bias: list[Tensor], beta: Any = 1, alpha: Any = 1, out: Tensor | None = None
) -> bool:
    """Return True if oneDNN's operator does just that: nothing scaled, a bias of one row, `out` of the right size."""
    shape, single = (left.shape[0], right.shape[1]), torch.float32
    a_row = all(factor.shape == shape[1:] and factor.dtype == single and factor.is_contiguous() for factor in bias)
    return beta == alpha == 1 and a_row and (out is None or (out.shape == shape and out.dtype == single))


def _worthwhile(left: Tensor, right: Tensor) -> bool:
    if any(factor.dtype != torch.float32 or factor.dim() != 2 for factor in (left, right)):  # a vector is torch's error
        return False
    (rows, inner), columns = left.shape, right.shape[1]
    dense = all(factor.is_contiguous() or factor.t().is_contiguous() for factor in (left, right))
    return dense and inner == right.shape[0] and rows * inner * columns >= LEAST


def _processor() -> str:
    file = Path("/proc/cpuinfo")
    return file.read_text().partition("\n\n")[0] if file.exists() else ""
