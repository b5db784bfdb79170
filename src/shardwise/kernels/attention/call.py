"""One call of attention as its kernels get it, and what it asks of a kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.job.devices import kernels_of
from shardwise.kernels.attention.masks import Mask, make_mask
from shardwise.kernels.dropout import ProbabilityBlock, active_scope, keep_mask
from shardwise.kernels.precision import DTYPES
from shardwise.model.attention_choice import AttentionNeeds

NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class DropoutFactors:
    """Dropout of attention probabilities: a function of key, rows and place.

    Attributes:
        key: of the step, module and use.
        rows: [B] global sample counters.
        probabilities: which these are.
        keep: probability.
    """

    key: int
    rows: Tensor
    probabilities: ProbabilityBlock
    keep: float

    def factors(self, heads: int, rows: slice, columns: slice, dtype: torch.dtype) -> Tensor:
        """Return [B, heads, Q, K] of a block: 0 or 1 / keep."""
        whole = self.probabilities
        part = ProbabilityBlock(whole.first, whole.queries[rows], whole.keys[columns], whole.length)
        kept = keep_mask(self.key, self.rows, part.index(heads), self.keep)
        return kept.view(len(self.rows), heads, len(part.queries), len(part.keys)).to(dtype) * (1 / self.keep)


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
            kernels_of(query.device.type),
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

    def added(self) -> Tensor | None:
        """Return the same as numbers alone: torch's kernels turn bools into those in each call, and keep them."""
        mask = self.mask
        if mask is None or mask.causal or self.bias is not None:
            return self.dense()
        return mask.as_additive(self.query.dtype)

    def dropout_factors(self) -> DropoutFactors:
        """Return the factors of the step's dropout scope; without one, of torch's generator."""
        batch, heads, queries, _ = self.query.shape
        device, keys, scope = self.query.device, self.key.shape[2], active_scope()
        whole = ProbabilityBlock(
            0, torch.arange(queries, device=device), torch.arange(keys, device=device), max(queries, keys)
        )
        if scope is None:
            key = int(torch.randint(2**62, ()))
            return DropoutFactors(key, torch.arange(batch, device=device), whole, 1 - self.dropout)
        probabilities = scope.probability_block or ProbabilityBlock(
            scope.part * heads, whole.queries, whole.keys, whole.length
        )
        key = scope.key(self.dropout_name or f"{scope.block}/functional")
        return DropoutFactors(key, scope.rows, probabilities, 1 - self.dropout)
