"""Operators of ATen and oneDNN that have no public function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_ATEN = torch.ops.aten
FEW = 4  # times more features has the result, at least: then the sum takes about as long as reading it

# Matrix products and fused attention, by the operators that autograd sees; some have private names alone.
PRODUCT_OPERATORS = tuple(
    operator.default
    for operator in (
        _ATEN.mm,
        _ATEN.addmm,
        _ATEN.bmm,
        _ATEN.baddbmm,
        _ATEN._scaled_mm,
        _ATEN._grouped_mm,
        _ATEN._scaled_dot_product_flash_attention,
        _ATEN._scaled_dot_product_efficient_attention,
        _ATEN._scaled_dot_product_cudnn_attention,
        _ATEN._scaled_dot_product_flash_attention_for_cpu,
    )
)


def updates_a_result(operator: Any, args: Sequence[Any]) -> bool:
    """Return whether an operator adds a product of few inner features to a matrix, or to each of a stack of them.

    A bias would be a vector, or a matrix that is broadcast.
    """
    if operator not in (_ATEN.addmm.default, _ATEN.baddbmm.default):
        return False
    added, left, right = args[:3]
    is_whole = added.shape == (*left.shape[:-1], right.shape[-1])
    return bool(is_whole and FEW * left.shape[-1] <= added.shape[-1])


new_empty = _ATEN.new_empty.default
grouped_product = _ATEN._grouped_mm.default
device_of = torch.ops.prim.device.default  # asked of a fake tensor at every turn
# No public name: what a `record_function` opens and closes.
open_range = torch.ops.profiler._record_function_enter_new.default
close_range = torch.ops.profiler._record_function_exit._RecordFunction
read_scalar = _ATEN._local_scalar_dense.default  # no public name: what `Tensor.item` dispatches to


# No public name: the product of a linear layer by oneDNN (torch 2.11 to 2.13); builds of torch without it have none.
onednn_linear: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def multiplies(dtype: torch.dtype) -> bool:
    """Return True if this processor has instructions for matrix products of 16 bits, as torch's CPU kernels ask.

    True too where a build of torch cannot say.
    """
    name = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}.get(dtype)
    ask = getattr(torch.ops.mkldnn, name, None) if name else None
    return ask is None or bool(ask())


def has_flash_attention(query: Tensor) -> bool:
    """Return True if the fused kernel that also gives the log-sum-exp runs on these tensors [B, h, S, d]."""
    return query.device.type == "cpu"


# No public name: scaled_dot_product_attention keeps the log-sum-exp to itself (torch 2.11 to 2.13).
def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(output [B, h, Q, d], log-sum-exp [B, h, Q]) of torch's fused attention on a CPU; `mask` is added to scores."""
    output, logs = _ATEN._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=mask, scale=scale
    )
    return output, logs


def flash_attention_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    scale: float,
    gradient: Tensor,
    output: Tensor,
    logs: Tensor,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value for a given output, its gradient and log-sum-exp."""
    grads: tuple[Tensor, Tensor, Tensor] = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, query, key, value, output, logs, 0.0, causal, attn_mask=mask, scale=scale
    )
    return grads


# No public name: scaled_dot_product_attention chooses it for tensors on a GPU alone (torch 2.11 to 2.13).
def gpu_flash_attention(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> Tensor:
    """Return [B, h, Q, d] of flash attention on a GPU, for tensors that have no values."""
    output: Tensor = _ATEN._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, False, scale=scale)[0]
    return output
