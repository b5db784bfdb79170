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

from shardwise._torch_compat.tracing import is_fake
from shardwise.job.devices import CUDA, kernels_of
from shardwise.job.tasks import IGNORED

MOST_COUNTED = 15 / 16  # share of rows with a label from which all are computed


class VocabularyShard(NamedTuple):
    """Rows `first` to `end` of the output projection, on this rank of `group`."""

    group: dist.ProcessGroup
    first: int
    end: int


class LossTerms(NamedTuple):
    """Terms added to the cross-entropy of a row with log-normaliser Z (the log-sum-exp of its logits).

    smoothing: the target has 1 - smoothing, and every one of the V classes smoothing / V besides (arXiv 1512.00567,
    section 7). z_loss: z_loss * Z**2 (PaLM, arXiv 2204.02311, section 5).
    """

    smoothing: float = 0.0
    z_loss: float = 0.0


NO_TERMS = LossTerms()


def loss_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which losses are accumulated: fp32, or fp64 for an fp64 model."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def count_labels(labels: Tensor) -> Tensor:
    """Return the number of counted labels, a 0-dim int64 tensor."""
    return (labels != IGNORED).sum()


def cross_entropy_sum(
    logits: Tensor, labels: Tensor, terms: LossTerms = NO_TERMS, weights: Tensor | None = None
) -> Tensor:
    """Return the summed cross-entropy (nats) of `logits` [..., V] against `labels` [...]; fp32, or fp64.

    With `weights` [...] each label's loss is multiplied by its own.
    """
    flat, targets = logits.flatten(0, -2).to(loss_dtype(logits.dtype)), labels.flatten()
    scale = label_scale(targets, weights, flat.dtype)
    losses = F.cross_entropy(flat, targets, ignore_index=IGNORED, reduction="none", label_smoothing=terms.smoothing)
    if terms.z_loss:
        losses = losses + terms.z_loss * flat.logsumexp(-1).square()
    return (losses * scale).sum()


def label_scale(labels: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return what each label's loss is multiplied by, shaped as `labels`: its weight, else 1; 0 if not counted."""
    counted = (labels != IGNORED).to(dtype)
    return counted if weights is None else counted * weights.view_as(labels).to(dtype)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
    chunk: int,
    seed: Tensor | float = 1.0,
    vocabulary: VocabularyShard | None = None,
    terms: LossTerms = NO_TERMS,
    weights: Tensor | None = None,
) -> Tensor:
    """Return the summed cross-entropy (nats) of `hidden @ weight.T + bias`, without whole logits.

    Args:
        hidden: [..., H] in the compute dtype; on a CPU those without a label are left out of the products.
        weight: [V, H] in the compute dtype; with `vocabulary` this rank's rows.
        bias: [V] or None; likewise.
        labels: [...] int64, -100 not counted.
        chunk: rows of logits that exist at once.
        seed: the gradient that backward will bring. The gradients are computed in forward already multiplied by it,
            so that fp16 keeps them in range; another gradient in backward is still right, only less well scaled.
        vocabulary: the rows of weight and bias that this rank holds; hidden and labels are equal in its group.
        terms: what is added to it.
        weights: [...] what each label's loss is multiplied by; None: 1.

    Returns:
        0-dim tensor, fp32 (fp64 for fp64 inputs), equal in the group.
    """
    rows, targets = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    scales = None if weights is None else weights.reshape(-1)
    counted = _counted_rows(targets)
    if counted is not None:
        rows, targets = rows.index_select(0, counted), targets[counted]
        scales = None if scales is None else scales[counted]
    total: Tensor = _LinearCrossEntropy.apply(rows, weight, bias, targets, chunk, seed, vocabulary, terms, scales)
    return total


def _counted_rows(targets: Tensor) -> Tensor | None:
    """Return the rows with a counted label, where a copy of them saves more products than it costs; None: all.

    On a GPU their number would have to be waited for, and of fake tensors nobody knows it.
    """
    if targets.device.type != "cpu" or is_fake(targets):
        return None
    counted = (targets != IGNORED).nonzero().squeeze(1)
    return counted if len(counted) < MOST_COUNTED * len(targets) else None


@torch.no_grad()
def label_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy (nats) of each label, [...], of `logits` [..., V]; 0 where it is not counted."""
    flat = logits.flatten(0, -2).to(loss_dtype(logits.dtype))
    return F.cross_entropy(flat, labels.flatten(), ignore_index=IGNORED, reduction="none").view_as(labels)


@torch.no_grad()
def linear_label_losses(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
    chunk: int,
    vocabulary: VocabularyShard | None = None,
) -> Tensor:
    """Return the same [...] of `hidden @ weight.T + bias`, without whole logits; arguments as `linear_cross_entropy`.

    Equal in the group of `vocabulary`; fp32, or fp64 for fp64 inputs.
    """
    rows, targets = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    memory = _Logits(min(chunk, rows.shape[0]), weight, loss_dtype(hidden.dtype))
    losses = []
    for start in range(0, rows.shape[0], chunk):
        part = slice(start, start + chunk)
        logits = memory.make(rows[part], weight, bias)
        index, is_local = _local_index(targets[part], vocabulary)
        columns = [logits.gather(1, index) * is_local]
        log_normaliser, target = _normaliser(_softmax_(logits), columns, vocabulary)
        losses.append(torch.where(targets[part] != IGNORED, (log_normaliser - target).squeeze(1), 0.0))
    return torch.cat(losses).view_as(labels)


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
        vocabulary: VocabularyShard | None,
        terms: LossTerms,
        weights: Tensor | None,
    ) -> Tensor:
        rows, targets = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
        dtype = loss_dtype(hidden.dtype)
        scale = label_scale(labels, weights, dtype).reshape(-1)
        total = rows.new_zeros((), dtype=dtype)
        wanted = any(ctx.needs_input_grad[:3])  # type: ignore[attr-defined]
        of_weight: bool = ctx.needs_input_grad[1]  # type: ignore[attr-defined]  # a frozen head has none
        grads = _Gradients(rows, weight, bias, dtype, of_weight) if wanted else None
        memory = _Logits(min(chunk, rows.shape[0]), weight, dtype)
        for start in range(0, max(rows.shape[0], 1), chunk):
            part = slice(start, start + chunk)
            logits = memory.make(rows[part], weight, bias)
            total.add_(_chunk(logits, targets[part], scale[part], bool(grads), vocabulary, terms))
            if grads:
                grads.add(part, logits, scale[part].unsqueeze(1) * seed, memory.low[: logits.shape[0]])
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
            None if weight is None else weight.mul_(factor).to(weight_dtype),
            None if bias is None else bias.mul_(factor).to(weight_dtype),
            *(None,) * 6,
        )


def _chunk(
    logits: Tensor,
    targets: Tensor,
    scale: Tensor,
    wanted: bool,
    vocabulary: VocabularyShard | None = None,
    terms: LossTerms = NO_TERMS,
) -> Tensor:
    """Sum of scale [R] x loss; where `wanted`, `logits` [R, V] become the gradients of each row's loss, in place.

    That is softmax - onehot; with `terms` (1 + 2 * z_loss * Z) * softmax - (1 - smoothing) * onehot - smoothing / V.
    Rows that are not counted have one too, and scale 0.
    """
    index, is_local = _local_index(targets, vocabulary)
    columns = [logits.gather(1, index) * is_local]
    if terms.smoothing:  # the sum of all logits, and over how many
        columns += [logits.sum(1, keepdim=True), torch.full_like(columns[0], logits.shape[1])]
    local = _softmax_(logits)
    log_normaliser, target, *sums = _normaliser(local, columns, vocabulary)
    share = terms.smoothing / sums[1] if sums else 0.0  # of every class
    row_losses = log_normaliser - (1 - terms.smoothing) * target + terms.z_loss * log_normaliser.square()
    row_losses = (row_losses - share * sums[0] if sums else row_losses).squeeze(1)
    loss = torch.where(targets != IGNORED, row_losses * scale, 0.0).sum()
    if wanted:
        if vocabulary is not None or terms.z_loss:  # else 1
            logits.mul_((1 + 2 * terms.z_loss * log_normaliser) * (local - log_normaliser).exp())
        logits.scatter_add_(1, index, is_local.to(logits.dtype) * (terms.smoothing - 1))
        if sums:
            logits.sub_(share)
    return loss


def _local_index(targets: Tensor, vocabulary: VocabularyShard | None) -> tuple[Tensor, Tensor]:
    """[R, 1] column of each target among this rank's logits, and whether it holds the target's."""
    index = targets.clamp(min=0).unsqueeze(1)
    if vocabulary is None:
        return index, torch.ones_like(index, dtype=torch.bool)
    is_local = (index >= vocabulary.first) & (index < vocabulary.end)
    return (index - vocabulary.first).masked_fill(~is_local, 0), is_local


def _softmax_(logits: Tensor) -> Tensor:
    """[R, 1] log-sum-exp of the rows, which become their softmax: no second [R, V] is made.

    The largest logit's share is 1 / sum(exp(logit - largest)), at least 1 / V: the sum need not be taken again.
    """
    highest = logits.amax(1, keepdim=True)
    torch.softmax(logits, 1, out=logits)
    return highest - logits.amax(1, keepdim=True).log()


def _normaliser(local: Tensor, columns: list[Tensor], vocabulary: VocabularyShard | None) -> list[Tensor]:
    """[R, 1] log-sum-exp over the whole vocabulary from that of its parts, and `columns` [R, 1] summed over them."""
    if vocabulary is None:
        return [local, *columns]
    highest = local.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=vocabulary.group)
    together = torch.cat([(local - highest).exp(), *columns], dim=1)
    dist.all_reduce(together, group=vocabulary.group)
    exponentials, *sums = together.split(1, dim=1)
    return [highest + exponentials.log(), *sums]


class _Logits:
    """The memory of the one chunk of logits that exists: [R, V] in the loss dtype, and `low` in the weight's.

    All chunks are made in it: on a CPU fresh pages cost a fifth of the product that fills them.
    """

    def __init__(self, rows: int, weight: Tensor, dtype: torch.dtype) -> None:
        self.low = weight.new_empty(rows, weight.shape[0])
        self.whole = self.low if weight.dtype == dtype else torch.empty_like(self.low, dtype=dtype)

    def make(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`rows @ weight.T + bias` [R, V] in the loss dtype."""
        low, whole = self.low[: rows.shape[0]], self.whole[: rows.shape[0]]
        if bias is None:
            torch.mm(rows, weight.T, out=low)
        else:
            torch.addmm(bias, rows, weight.T, out=low)
        return whole if whole.dtype == low.dtype else whole.copy_(low)


class _Gradients:
    """Accumulators of one call: d hidden [R, H] in its dtype, d weight [V, H] and d bias [V] in the loss dtype.

    That of the weight is left out unless `of_weight`.
    """

    def __init__(self, rows: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, of_weight: bool) -> None:
        self.rows, self.matrix = rows, weight
        self.hidden = torch.empty_like(rows)
        self.weight = torch.empty_like(weight, dtype=dtype) if of_weight else None
        self.bias = None if bias is None else torch.zeros_like(bias, dtype=dtype)

    def add(self, part: slice, gradient: Tensor, scale: Tensor, low: Tensor) -> None:
        """The share of rows `part`, whose logits' gradient is scale [R, 1] * gradient [R, V]; `low` [R, V] is lost.

        In full precision the few columns of the hidden states are scaled in place of the many of the vocabulary; lower
        precisions scale before they round, which keeps fp16 in range.
        """
        if self.bias is not None:
            self.bias.addmv_(gradient.T, scale.squeeze(1))
        rows, first = self.rows[part], part.start == 0  # what the first chunk finds in self.weight is not a number yet
        if gradient.dtype == self.matrix.dtype:
            torch.mm(gradient, self.matrix, out=self.hidden[part]).mul_(scale)
            if self.weight is not None:
                self.weight.addmm_(gradient.T, rows * scale, beta=0 if first else 1)
        else:
            torch.mul(gradient, scale, out=low)
            torch.mm(low, self.matrix, out=self.hidden[part])
            if self.weight is not None:
                if first:
                    self.weight.zero_()
                _add_product(self.weight, low.T, rows)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `left @ right`, which has fewer bits, to `total`; CUDA does it in one pass, without rounding in between."""
    is_there = not total.is_cuda or (torch.version.cuda and not is_fake(total))  # ROCm's and torch's fake one are not
    if kernels_of(total.device.type) == CUDA and is_there:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.add_(left @ right)
