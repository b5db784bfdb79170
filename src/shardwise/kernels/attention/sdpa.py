"""Attention by torch's scaled_dot_product_attention: the kernel that it chooses, or one that it is held to."""

from __future__ import annotations

from contextlib import nullcontext

from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwise.kernels.attention.blocks import repeat_key_heads
from shardwise.kernels.attention.call import AttentionCall


def sdpa(call: AttentionCall) -> Tensor:
    """Return [B, h, Q, d] of a call by the kernel that torch chooses."""
    return _scaled_dot_product(call)


def flash(call: AttentionCall) -> Tensor:
    """Return [B, h, Q, d] of a call by flash attention; on a CPU it is what torch chooses without a mask."""
    return _scaled_dot_product(call, SDPBackend.FLASH_ATTENTION)


def efficient(call: AttentionCall) -> Tensor:
    """Return [B, h, Q, d] of a call by the memory-efficient kernel."""
    return _scaled_dot_product(call, SDPBackend.EFFICIENT_ATTENTION)


def cudnn(call: AttentionCall) -> Tensor:
    """Return [B, h, Q, d] of a call by cuDNN's kernel."""
    return _scaled_dot_product(call, SDPBackend.CUDNN_ATTENTION)


def _scaled_dot_product(call: AttentionCall, backend: SDPBackend | None = None) -> Tensor:
    mask = call.added()
    grouped = call.key.shape[1] != call.query.shape[1]
    keys, values, options = call.key, call.value, {}
    # The CPU's kernel adds the gradients of a group's keys up in their own dtype, which 16 bits are too few for. On
    # accelerators those of 16 bits alone take groups; of others torch would write all scores.
    fits = (call.query.element_size() < 4) is (call.query.device.type != "cpu")
    takes_groups = mask is None and fits and backend is not SDPBackend.EFFICIENT_ATTENTION
    if grouped and takes_groups:
        options = {"enable_gqa": True}
    elif grouped:
        keys, values = repeat_key_heads(keys, call.query), repeat_key_heads(values, call.query)
    with sdpa_kernel(backend) if backend is not None and call.query.is_cuda else nullcontext():
        return F.scaled_dot_product_attention(
            call.query,
            keys,
            values,
            attn_mask=mask,
            dropout_p=call.dropout,
            is_causal=call.is_causal and mask is None,
            scale=call.scale,
            **options,  # type: ignore[arg-type]
        )
