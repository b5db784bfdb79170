"""One door for attention: one signature, and behind it the kernel that the call, the device and the dtype ask for.

`model/attention_kernels.py` says what each kernel can do; the functions here run them. Models of transformers come in
through parallel/transforms/attention.py, which translates what their attention modules say.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwise.errors import KernelError
from shardwise.kernels.attention.blocks import repeat_key_heads
from shardwise.kernels.attention.blockwise import BlockwiseSettings, DropoutFactors, blockwise_attention
from shardwise.kernels.attention.masks import Mask, make_mask
from shardwise.kernels.dropout import ProbabilityBlock, active_scope
from shardwise.kernels.loss import loss_dtype
from shardwise.kernels.precision import DTYPES
from shardwise.model.attention_kernels import BY_NAME as KERNELS
from shardwise.model.attention_kernels import AttentionNeeds, KernelChoice, choose_kernel, kernel_supports, kernels_for

NAMES = {dtype: name for name, dtype in DTYPES.items()}
BACKENDS = {
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
}


@dataclass(frozen=True)
class AttentionCall:
    """One call of attention: tensors [B, h, Q, e], [B, k, K, e], [B, k, K, d], and what is done with the scores."""

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    causal: bool = False
    mask: Mask | None = None
    bias: Tensor | None = None
    softcap: float | None = None
    dropout: float = 0.0
    dropout_name: str | None = None

    @property
    def needs(self) -> AttentionNeeds:
        """Abilities that the call asks of a kernel."""
        query, value = self.query, self.value
        return AttentionNeeds(
            query.device.type,
            NAMES[query.dtype],
            self.mask is not None and not self.mask.causal,
            self._bias_kind,
            self.softcap is not None,
            self.dropout > 0,
            query.shape[-1],
            value.shape[-1],
            torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, self.key, value)),
        )

    @property
    def _bias_kind(self) -> str:
        if self.bias is None:
            return ""
        if self.bias.requires_grad and torch.is_grad_enabled():
            return "trained"
        return "keys" if self.bias.shape[2] == 1 and self.query.shape[2] > 1 else "scores"

    @property
    def is_causal(self) -> bool:
        """True where exactly the keys ahead are hidden."""
        return self.causal if self.mask is None else self.mask.causal

    def dense(self) -> Tensor | None:
        """Return what is added to the scores, whole: [1 or B, 1 or h, Q, K]; bool where keys are hidden and no more."""
        mask = self.mask
        if mask is None and self.causal and self.bias is not None:
            positions = torch.arange(self.query.shape[2], device=self.query.device)
            mask = make_mask(1, positions, causal=True)
        if self.bias is None:
            return None if mask is None or mask.causal else mask.dense
        bias = self.bias.to(self.query.dtype)
        return bias if mask is None else torch.where(mask.dense, bias, torch.finfo(bias.dtype).min)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = False,
    padding: Tensor | None = None,
    documents: Tensor | None = None,
    window: int | None = None,
    alibi: Tensor | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
    kernel: str = "auto",
) -> Tensor:
    """Return [B, h, S, d] softmax(scale * query @ key.T + bias) @ value, by the kernel that fits.

    Positions count from 0.

    Args:
        query: [B, h, S, e].
        key, value: [B, k, S, e] and [B, k, S, d], k a divisor of h (grouped-query attention).
        causal: later keys are hidden.
        padding: [B, S] bool, False: hidden from all. A query that sees nothing has an output without meaning.
        documents: [B, S] number of each position's document; keys of others are hidden.
        window: keys that a query sees, itself the last (arXiv 2004.05150); without `causal` as many to the other side.
        alibi: [h] slopes m; m * key position is added to the scores (arXiv 2108.12409, section 3).
        bias: [1 or B, 1 or h, 1 or S, S] added to the scores.
        softcap: scores s become cap * tanh(s / cap) (Gemma 2, arXiv 2408.00118, section 2).
        dropout: probability with which probabilities are dropped.
        scale: unset: 1 / sqrt(e).
        kernel: `auto` or a name of `shardwise.model.attention_kernels.KERNELS`.

    Raises:
        KernelError: the kernel cannot do what is asked, or there is none that can.
    """
    positions = torch.arange(query.shape[2], device=query.device)
    mask = None
    if padding is not None or documents is not None or window is not None:
        mask = make_mask(query.shape[0], positions, causal=causal, padding=padding, documents=documents, window=window)
    if alibi is not None:
        slopes = (alibi.view(1, -1, 1, 1) * positions).to(query.dtype)
        bias = slopes if bias is None else bias + slopes
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return run_attention(AttentionCall(query, key, value, scale, causal, mask, bias, softcap, dropout), kernel)


def run_attention(call: AttentionCall, kernel: str = "auto") -> Tensor:
    """Run a call: [B, h, Q, d]. Raises KernelError where no kernel can do it."""
    return RUNNERS[kernel_of_call(call, kernel).kernel.name](call)


def kernel_of_call(call: AttentionCall, kernel: str) -> KernelChoice:
    """Choose the kernel of a call, with the reason. Raises KernelError where the one asked for cannot do it."""
    needs = call.needs
    choice = choose_kernel(kernel, needs)
    if choice is None:
        why = (
            f": {kernel_supports(KERNELS[kernel], needs).reason}"
            if kernel != "auto"
            else " has no kernel for this call"
        )
        raise KernelError(f"model.attention={kernel!r}{why}; use {' or '.join(kernels_for(needs)) or 'another model'}")
    return choice


def _eager(call: AttentionCall) -> Tensor:
    wide = loss_dtype(call.query.dtype)
    key, value = repeat_key_heads(call.key, call.query), repeat_key_heads(call.value, call.query)
    scores = (call.query.to(wide) @ key.to(wide).mT) * call.scale
    if call.softcap is not None:
        scores = (scores / call.softcap).tanh() * call.softcap
    added = call.dense()
    if call.is_causal and (added is None or call.mask is not None):
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
        scores = scores.masked_fill(ahead, torch.finfo(wide).min)
    if added is not None:
        scores = scores.masked_fill(~added, torch.finfo(wide).min) if added.dtype == torch.bool else scores + added
    weights = scores.softmax(-1)
    if call.dropout > 0:
        dropout_factors = _dropout_factors(call)
        weights = weights * dropout_factors.factors(weights.shape[1], slice(None), slice(None), wide)
    return (weights @ value.to(wide)).to(value.dtype)  # in backward too: products of fp16 leave its range


def _blockwise(call: AttentionCall) -> Tensor:
    dropout_factors = _dropout_factors(call) if call.dropout > 0 else None
    settings = BlockwiseSettings(call.scale, call.causal, call.mask, call.bias, call.softcap, dropout_factors)
    return blockwise_attention(call.query, call.key, call.value, settings)


def _dropout_factors(call: AttentionCall) -> DropoutFactors:
    """Return the factors of the step's dropout scope; without one, of torch's generator."""
    batch, heads, queries, _ = call.query.shape
    device, keys, scope = call.query.device, call.key.shape[2], active_scope()
    whole = ProbabilityBlock(
        0, torch.arange(queries, device=device), torch.arange(keys, device=device), max(queries, keys)
    )
    if scope is None:
        key = int(torch.randint(2**62, ()))
        return DropoutFactors(key, torch.arange(batch, device=device), whole, 1 - call.dropout)
    probabilities = scope.probability_block or ProbabilityBlock(
        scope.part * heads, whole.queries, whole.keys, whole.length
    )
    key = scope.key(call.dropout_name or f"{scope.block}/functional")
    return DropoutFactors(key, scope.rows, probabilities, 1 - call.dropout)


def _sdpa(call: AttentionCall, name: str = "sdpa") -> Tensor:
    mask = call.dense()
    grouped = call.key.shape[1] != call.query.shape[1]
    keys, values, options = call.key, call.value, {}
    # The CPU's kernel adds the gradients of a group's keys up in their own dtype, which 16 bits are too few for.
    coarse = call.query.device.type == "cpu" and call.query.element_size() < 4
    if grouped and mask is None and not coarse:
        options = {"enable_gqa": True}
    elif grouped:
        keys, values = repeat_key_heads(keys, call.query), repeat_key_heads(values, call.query)
    with sdpa_kernel(BACKENDS[name]) if name in BACKENDS and call.query.is_cuda else nullcontext():
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


def _flex(call: AttentionCall) -> Tensor:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    bias, cap, mask = call.bias, call.softcap, call.mask

    def score(value: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if cap is not None:
            value = cap * (value / cap).tanh()
        if bias is None:
            return value
        at = [index if size > 1 else 0 for index, size in zip((b, h, q, k), bias.shape, strict=True)]
        return value + bias[at[0], at[1], at[2], at[3]]

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if mask is None:
            return q >= k
        result = mask.function(b, h, mask.rows[q], mask.columns[k])
        return result

    hides = mask is not None or call.causal
    queries, keys = call.query.shape[2], call.key.shape[2]
    batch = None if mask is None else call.query.shape[0]
    hidden = create_block_mask(visible, batch, None, queries, keys, call.query.device.type) if hides else None
    attend: Any = torch.compile(flex_attention) if call.query.is_cuda else flex_attention
    key, value = repeat_key_heads(call.key, call.query), repeat_key_heads(call.value, call.query)
    bent = score if cap is not None or bias is not None else None
    output: Tensor = attend(call.query, key, value, bent, hidden, scale=call.scale)
    return output


def _flash_package(call: AttentionCall, package: str) -> Tensor:
    function = import_module(package).flash_attn_func
    options = {"softcap": call.softcap or 0.0, "softmax_scale": call.scale, "causal": call.is_causal}
    if call.dropout > 0:
        options["dropout_p"] = call.dropout
    output = function(*(tensor.transpose(1, 2) for tensor in (call.query, call.key, call.value)), **options)
    output = output[0] if isinstance(output, tuple) else output
    result: Tensor = output.transpose(1, 2)
    return result


RUNNERS: dict[str, Callable[[AttentionCall], Tensor]] = {
    "eager": _eager,
    "blockwise": _blockwise,
    "sdpa": _sdpa,
    "flash": lambda call: _sdpa(call, "flash"),
    "efficient": lambda call: _sdpa(call, "efficient"),
    "cudnn": lambda call: _sdpa(call, "cudnn"),
    "flex": _flex,
    "flash_attention_2": lambda call: _flash_package(call, "flash_attn"),
    "flash_attention_3": lambda call: _flash_package(call, "flash_attn_interface"),
}
