"""Attention and masks that transformers' interfaces call, by the kernels of kernels/attention/dispatch.py.

The model's `attn_implementation` becomes one of ours, for which transformers' AttentionInterface and
AttentionMaskInterface hold the two functions here. Masks are the model's own mask functions together with the documents
of the microbatch that runs, as a `Mask` that is made block by block; so windows and documents hold at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import causal_mask_function

from shardwise.kernels.attention.call import AttentionCall
from shardwise.kernels.attention.dispatch import kernel_of_call, run_attention
from shardwise.kernels.attention.masks import Mask, MaskFunction, make_mask, same_document
from shardwise.kernels.dropout import active_scope
from shardwise.model.interface_attention import InterfaceAttention, eager_attention_forward

PREFIX = "shardwise_"


def use_attention_kernel(model: nn.Module, kernel: str) -> None:
    """Let `model` (of a family whose record has `attention`) run `kernel`: `auto` or a name of
    job/attention_kernels.py."""
    name = PREFIX + kernel
    AttentionInterface.register(name, partial(attend, kernel))
    AttentionMaskInterface.register(name, masked)
    set_implementation(model, name)


def set_implementation(model: nn.Module, name: str) -> None:
    """Make `name` the attention of all parts of the model.

    transformers' own setter leaves models alone whose source does not name the interface (GPT-J and its kind).
    """
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            config._attn_implementation_internal = name


def attend(
    kernel: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    key_bias: Tensor | None = None,
    is_causal: bool | None = None,
    local_window: int | None = None,
    dropout_name: str | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: [B, h, S, d] tensors -> ([B, S, h, d], no weights)."""
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal) and query.shape[2] > 1
    bias, mask = key_bias if position_bias is None else position_bias, attention_mask
    if isinstance(mask, Tensor):
        causal = causal and getattr(module, "always_causal", False)  # else it says itself whether keys ahead are seen
        mask, bias = _given(mask, bias, query)
    if local_window is not None:
        mask = _local(mask, local_window, query, key)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    call = AttentionCall(query, key, value, scale, causal, mask, bias, softcap, dropout, dropout_name)
    if kernel_of_call(call, kernel).kernel.name == "eager":
        given = attention_mask if isinstance(attention_mask, Tensor) and attention_mask.dtype != torch.bool else None
        return _own_eager(module, call, given, position_bias=position_bias, key_bias=key_bias), None
    return run_attention(call, kernel).transpose(1, 2), None


def _own_eager(module: nn.Module, call: AttentionCall, given: Tensor | None, **biases: Tensor | None) -> Tensor:
    """Run the eager attention in the file of the module's class, which is the reference.

    `given` is a mask of numbers that the model's caller made.
    """
    more = {"softcap": call.softcap, **biases}
    mask = call.mask
    if mask is None and call.causal:
        mask = make_mask(1, torch.arange(call.query.shape[2], device=call.query.device), causal=True)
    added = None if mask is None else mask.as_additive(call.query.dtype)
    if given is not None:
        added = given if added is None else torch.where(added < 0, added, given)
    output: Tensor = own_attention("eager", module)(
        module,
        call.query,
        call.key,
        call.value,
        added,
        scaling=call.scale,
        dropout=call.dropout,
        **{name: value for name, value in more.items() if value is not None},
    )[0]
    return output


def own_attention(name: str, module: nn.Module) -> Callable[..., Any]:
    """Return the function that the model would have called; an eager one stands in the file of its class."""
    if name == "eager" and isinstance(module, InterfaceAttention):
        return eager_attention_forward
    if name == "eager":
        return sys.modules[type(module).__module__].eager_attention_forward  # type: ignore[no-any-return]
    return AttentionInterface()[name]  # type: ignore[no-any-return]


def _given(mask: Tensor, bias: Tensor | None, query: Tensor) -> tuple[Mask | None, Tensor | None]:
    """Return (mask, bias) of a mask that the model's caller made whole: a bool one stays, others join the bias."""
    if mask.dtype != torch.bool:
        mask = mask.clamp(min=torch.finfo(query.dtype).min)  # else a row that is hidden whole is NaN in 16 bits
        return None, mask if bias is None else bias + mask
    rows, columns = (torch.arange(size, device=mask.device) for size in mask.shape[-2:])
    return Mask(lambda b, h, q, k: mask[b % len(mask), 0, q, k], rows, columns, query.shape[0]), bias


def _local(mask: Mask | None, window: int, query: Tensor, key: Tensor) -> Mask | None:
    """Return the causal mask of a layer whose queries see `window` keys."""
    if window >= key.shape[2]:
        return mask
    known = mask or make_mask(1, torch.arange(key.shape[2], device=query.device), causal=True)
    return known.within(window)


def masked(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: MaskFunction,
    device: torch.device | str,
    attention_mask: Tensor | None = None,
    q_offset: int = 0,
    kv_offset: int = 0,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **rest: Any,
) -> Mask | None:
    """Return the model's kind of mask, with the documents of the microbatch that runs.

    None where nothing more than the keys ahead is hidden (causal models) or nothing at all (others).
    """
    scope = active_scope()
    documents = None if scope is None else scope.documents
    padding = None if documents is not None or attention_mask is None else attention_mask.bool()
    hides = documents is not None or not (padding is None or bool(padding.all()))
    whole = q_length == kv_length and q_offset == kv_offset and (local_size is None or local_size >= kv_length)
    if not hides and whole and (allow_is_causal_skip or allow_is_bidirectional_skip):
        return None

    def function(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        visible = mask_function(b, h, q, k)
        if documents is not None:
            return visible & same_document(documents, b, q, k)
        return visible if padding is None else visible & padding[b, k]

    rows = torch.arange(q_length, device=device) + q_offset
    columns = torch.arange(kv_length, device=device) + kv_offset
    plain = mask_function is causal_mask_function and not hides and whole
    return Mask(function, rows, columns, batch_size, plain)
