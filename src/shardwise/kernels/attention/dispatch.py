"""One door for attention: one signature, and behind it the kernel that the call, the device and the dtype ask for.

The records of `job/attention_kernels.py` say what each kernel can do and which function of this room runs it. Models of
transformers come in through parallel/transforms/attention.py, which translates what their attention modules say.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor

from shardwise.errors import KernelError
from shardwise.job.attention_kernels import KERNELS, AttentionKernel, kernel_named
from shardwise.kernels.attention.call import AttentionCall
from shardwise.kernels.attention.masks import make_mask
from shardwise.model.attention_choice import KernelChoice, choose_kernel, kernel_supports, kernels_for

AttentionFunction = Callable[[AttentionCall], Tensor]


def load_function(kernel: AttentionKernel) -> AttentionFunction:
    """Return the function that the record of a kernel names."""
    file, _, name = kernel.function.partition(":")
    function: AttentionFunction = getattr(import_module(f"shardwise.kernels.attention.{file}"), name)
    return function


FUNCTIONS = {kernel.name: load_function(kernel) for kernel in KERNELS}


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
        kernel: `auto` or a name of `shardwise.job.attention_kernels.KERNELS`.

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
    return FUNCTIONS[kernel_of_call(call, kernel).kernel.name](call)


def kernel_of_call(call: AttentionCall, kernel: str) -> KernelChoice:
    """Choose the kernel of a call, with the reason. Raises KernelError where the one asked for cannot do it."""
    needs = call.needs
    choice = choose_kernel(kernel, needs)
    if choice is None:
        why = (
            f": {kernel_supports(kernel_named(kernel), needs).reason}"
            if kernel != "auto"
            else " has no kernel for this call"
        )
        raise KernelError(f"model.attention={kernel!r}{why}; use {' or '.join(kernels_for(needs)) or 'another model'}")
    return choice
