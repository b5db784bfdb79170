"""Cross-entropy as (sum, count): the output projection and the loss in one, in chunks, and the plain one.

The chunked form computes a chunk's logits, its loss and the gradients of hidden states and weight before the next
chunk starts, so [B*S, vocabulary] logits never exist whole. Labels are aligned with positions; -100 is not counted.
With a part of the vocabulary on each rank of a tensor group, two small all-reduces a chunk take the place of gathering.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

IGNORED = -100


class Vocabulary(NamedTuple):
    """Rows `first` to `end` of the output projection, on this rank of `group`."""

    group: dist.ProcessGroup
    first: int
    end: int


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
    vocabulary: Vocabulary | None = None,
) -> Tensor:
    """Summed cross-entropy (nats) of `hidden @ weight.T + bias`, without whole logits.

    Args:
        hidden: [..., H] in the compute dtype.
        weight: [V, H] in the compute dtype; with `vocabulary` this rank's rows.
        bias: [V] or None; likewise.
        labels: [...] int64, -100 not counted.
        chunk: rows of logits that exist at once.
        seed: the gradient that backward will bring. The gradients are computed in forward already multiplied by it,
            so that fp16 keeps them in range; another gradient in backward is still right, only less well scaled.
        vocabulary: the rows of weight and bias that this rank holds; hidden and labels are equal in its group.

    Returns:
        0-dim tensor, fp32 (fp64 for fp64 inputs), equal in the group.
    """
    total: Tensor = _LinearCrossEntropy.apply(hidden, weight, bias, labels, chunk, seed, vocabulary)
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
        vocabulary: Vocabulary | None,
    ) -> Tensor:
        rows, targets = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
        dtype = loss_dtype(hidden.dtype)
        total = rows.new_zeros((), dtype=dtype)
        wanted = any(ctx.needs_input_grad[:3])  # type: ignore[attr-defined]
        grads = _Gradients(rows, weight, bias, dtype) if wanted else None
        for start in range(0, rows.shape[0], chunk):
            part = slice(start, start + chunk)
            logits = F.linear(rows[part], weight, bias).to(dtype)
            total += _chunk(logits, targets[part], seed if grads else None, vocabulary)
            if grads:
                grads.add(part, logits)
        if grads:
            if vocabulary is not None:  # each rank's logits contribute to the hidden states' gradient
                dist.all_reduce(grads.hidden, group=vocabulary.group)
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
            None,
        )


def _chunk(
    logits: Tensor, targets: Tensor, seed: Tensor | float | None, vocabulary: Vocabulary | None = None
) -> Tensor:
    """Summed loss of one chunk; with a seed, `logits` [R, V] becomes seed * (softmax - onehot) in place."""
    counted = targets != IGNORED
    index = targets.clamp(min=0).unsqueeze(1)
    here = torch.ones_like(index, dtype=torch.bool)  # whether this rank holds the target's logit
    if vocabulary is not None:
        here = (index >= vocabulary.first) & (index < vocabulary.end)
        index = (index - vocabulary.first).masked_fill(~here, 0)
    log_normaliser, wanted = _normaliser(logits, logits.gather(1, index) * here, vocabulary)
    loss = torch.where(counted, (log_normaliser - wanted).squeeze(1), 0.0).sum()
    if seed is not None:
        logits.sub_(log_normaliser).exp_()
        logits.scatter_add_(1, index, -here.to(logits.dtype))
        logits.mul_((counted.to(logits.dtype) * seed).unsqueeze(1))
    return loss


def _normaliser(logits: Tensor, wanted: Tensor, vocabulary: Vocabulary | None) -> tuple[Tensor, Tensor]:
    """[R, 1] log of the sum of exponentials over the whole vocabulary, and [R, 1] logit of the target."""
    if vocabulary is None:
        return torch.logsumexp(logits, dim=1, keepdim=True), wanted
    highest = logits.amax(1, keepdim=True)
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=vocabulary.group)
    both = torch.cat([(logits - highest).exp_().sum(1, keepdim=True), wanted], dim=1)
    dist.all_reduce(both, group=vocabulary.group)
    return highest + both[:, :1].log(), both[:, 1:]


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
