"""Cross-entropy as (sum, count): the output projection and the loss in one, in chunks, and the plain one.

The chunked form computes a chunk's logits, its loss and the gradients of hidden states and weight before the next
chunk starts, so [B*S, vocabulary] logits never exist whole. Labels are aligned with positions; -100 is not counted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

IGNORED = -100


def loss_dtype(dtype: torch.dtype) -> torch.dtype:
    """Losses are accumulated in fp32, or in fp64 for an fp64 model."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def count_labels(labels: Tensor) -> Tensor:
    """Number of counted labels, a 0-dim int64 tensor."""
    return (labels != IGNORED).sum()


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Summed cross-entropy (nats) of `logits` [..., V] against `labels` [...]; fp32, or fp64 for fp64 logits."""
    flat = logits.flatten(0, -2).to(loss_dtype(logits.dtype))
    return F.cross_entropy(flat, labels.flatten(), ignore_index=IGNORED, reduction="sum")


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
    chunk: int,
    seed: Tensor | float = 1.0,
) -> Tensor:
    """Summed cross-entropy (nats) of `hidden @ weight.T + bias`, without whole logits.

    Args:
        hidden: [..., H] in the compute dtype.
        weight: [V, H] in the compute dtype.
        bias: [V] or None.
        labels: [...] int64, -100 not counted.
        chunk: rows of logits that exist at once.
        seed: the gradient that backward will bring. The gradients are computed in forward already multiplied by it,
            so that fp16 keeps them in range; another gradient in backward is still right, only less well scaled.

    Returns:
        0-dim tensor, fp32 (fp64 for fp64 inputs).
    """
    total: Tensor = _LinearCrossEntropy.apply(hidden, weight, bias, labels, chunk, seed)
    return total


class _LinearCrossEntropy(torch.autograd.Function):
    """Gradients of the softmax cross-entropy are (p - onehot); they are taken chunk by chunk in forward."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        chunk: int,
        seed: Tensor | float,
    ) -> Tensor:
        rows, targets = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
        dtype = loss_dtype(hidden.dtype)
        total = rows.new_zeros((), dtype=dtype)
        wanted = any(ctx.needs_input_grad[:3])  # type: ignore[attr-defined]
        grads = _Gradients(rows, weight, bias, dtype) if wanted else None
        for start in range(0, rows.shape[0], chunk):
            part = slice(start, start + chunk)
            logits = F.linear(rows[part], weight, bias).to(dtype)
            total += _chunk(logits, targets[part], seed if grads else None)
            if grads:
                grads.add(part, logits)
        if grads:
            ctx.save_for_backward(grads.hidden, grads.weight, grads.bias)  # type: ignore[attr-defined,arg-type]
            ctx.seed, ctx.shape, ctx.weight_dtype = seed, hidden.shape, weight.dtype  # type: ignore[attr-defined]
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        factor = gradients[0] / ctx.seed
        weight_dtype = ctx.weight_dtype
        return (
            hidden.mul_(factor.to(hidden.dtype)).view(ctx.shape),
            weight.mul_(factor).to(weight_dtype),
            None if bias is None else bias.mul_(factor).to(weight_dtype),
            None,
            None,
            None,
        )


def _chunk(logits: Tensor, targets: Tensor, seed: Tensor | float | None) -> Tensor:
    """Summed loss of one chunk; with a seed, `logits` [R, V] becomes seed * (softmax - onehot) in place."""
    counted = targets != IGNORED
    index = targets.clamp(min=0).unsqueeze(1)
    log_normaliser = torch.logsumexp(logits, dim=1, keepdim=True)
    loss = torch.where(counted, (log_normaliser - logits.gather(1, index)).squeeze(1), 0.0).sum()
    if seed is not None:
        logits.sub_(log_normaliser).exp_()
        logits.scatter_add_(1, index, -torch.ones_like(log_normaliser))
        logits.mul_((counted.to(logits.dtype) * seed).unsqueeze(1))
    return loss


class _Gradients:
    """Accumulators of one call: d hidden [R, H] in its dtype, d weight [V, H] and d bias [V] in the loss dtype."""

    def __init__(self, rows: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        self.rows, self.matrix = rows, weight
        self.hidden = torch.empty_like(rows)
        self.weight = torch.zeros_like(weight, dtype=dtype)
        self.bias = None if bias is None else torch.zeros_like(bias, dtype=dtype)

    def add(self, part: slice, grad_logits: Tensor) -> None:
        if self.bias is not None:
            self.bias += grad_logits.sum(0)
        low = grad_logits.to(self.matrix.dtype)
        torch.mm(low, self.matrix, out=self.hidden[part])
        if low.dtype == self.weight.dtype:
            self.weight.addmm_(low.T, self.rows[part])
        else:
            self.weight += low.T @ self.rows[part]
