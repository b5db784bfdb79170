"""Attention by the packages flash-attn 2 and 3, which are imported when a call needs them."""

from __future__ import annotations

from importlib import import_module

from torch import Tensor

from shardwise.kernels.attention.call import AttentionCall


def flash_attention_2(call: AttentionCall) -> Tensor:
    """Return [B, h, Q, d] of a call by flash-attn 2."""
    return _flash_package(call, "flash_attn")


def flash_attention_3(call: AttentionCall) -> Tensor:
    """Return [B, h, Q, d] of a call by flash-attn 3."""
    return _flash_package(call, "flash_attn_interface")


def _flash_package(call: AttentionCall, package: str) -> Tensor:
    function = import_module(package).flash_attn_func
    options = {"softcap": call.softcap or 0.0, "softmax_scale": call.scale, "causal": call.is_causal}
    if call.dropout > 0:
        options["dropout_p"] = call.dropout
    output = function(*(tensor.transpose(1, 2) for tensor in (call.query, call.key, call.value)), **options)
    output = output[0] if isinstance(output, tuple) else output
    result: Tensor = output.transpose(1, 2)
    return result
