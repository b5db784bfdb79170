"""Attention that calls transformers' AttentionInterface, for families whose own attention in transformers does not.

A family's file derives a subclass from transformers' class and from `InterfaceAttention`; it takes the place of the
module's class on the meta device, and parameters, buffers and names stay. The family is then like any other: the probe
sees its attention, kernels can be chosen, sequences can be split.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

LOCAL_WINDOW = "local_window"  # argument of a call: a window that its mask does not know


def eager_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float = 1.0,
    key_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Compute these families' own arithmetic, in the dtypes in which transformers computes it.

    Args:
        module: an `InterfaceAttention`.
        query, key, value: [B, h, S, d].
        attention_mask: added to the scores.
        scaling: of the scores.
        key_bias: [B, h, 1, S], added to the scores.
        kwargs: `local_window` is the number of keys that a query sees.

    Returns:
        ([B, S, h, d], probabilities [B, h, S, S]).
    """
    wide = module.scores_dtype or query.dtype
    scores = (query.to(wide) @ key.to(wide).mT) * scaling  # type: ignore[arg-type]
    if key_bias is not None:
        scores = scores + key_bias
    if kwargs.get(LOCAL_WINDOW):
        rows, columns = (torch.arange(size, device=query.device) for size in scores.shape[-2:])
        far = columns <= rows.unsqueeze(1) + (len(columns) - len(rows)) - kwargs[LOCAL_WINDOW]
        scores = scores.masked_fill(far, torch.finfo(scores.dtype).min)
    if attention_mask is not None:
        scores = scores + attention_mask
    softmax_dtype: Any = module.softmax_dtype
    weights = scores.softmax(-1, dtype=softmax_dtype).to(value.dtype)
    weights = module.probability_dropout(weights)  # type: ignore[operator]
    return (weights @ value).transpose(1, 2), weights


class InterfaceAttention(nn.Module):
    """The call of the interface, with the probability and the name of the module that drops probabilities.

    Attributes:
        scores_dtype, softmax_dtype: of the eager arithmetic; None is the dtype of its input.
        always_causal: keys ahead are hidden whatever a mask says that the model's caller made.
    """

    config: Any
    scores_dtype: torch.dtype | None = None
    softmax_dtype: torch.dtype | None = None
    always_causal = False

    @property
    def probability_dropout(self) -> Any:
        """The module that drops probabilities."""
        return self.attn_dropout if hasattr(self, "attn_dropout") else self.attention_dropout

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float, **arguments: Any) -> Tensor:
        """Return attention by the chosen implementation, [B, h, S, d] -> [B, S, h, d]."""
        dropout = self.probability_dropout
        interface = AttentionInterface().get_interface(self.config._attn_implementation, eager_attention_forward)
        output: Tensor = interface(
            self,
            query,
            key,
            value,
            mask,
            scaling=scale,
            dropout=dropout.p if self.training else 0.0,
            dropout_name=getattr(dropout, "name", None),
            **arguments,
        )[0]
        return output
