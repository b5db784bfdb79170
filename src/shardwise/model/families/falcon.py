"""Falcon: its attention calls SDPA itself; one key and one value head may serve many queries."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from transformers.models.falcon.modeling_falcon import FalconAttention
from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb as rotate

from shardwise.model.facts import BlockTraits
from shardwise.model.family import Family, FamilyAttention
from shardwise.model.interface_attention import InterfaceAttention
from shardwise.model.split_rules import FUSED_PROJECTION, INTERLEAVED_BLOCK
from shardwise.model.tensor_split import TensorSplit

NO_DROPOUT = nn.Dropout(0.0)


class FalconInterfaceAttention(FalconAttention, InterfaceAttention):
    """Falcon's attention through the interface, with rotary positions or ALiBi's bias on keys."""

    def forward(
        self,
        hidden_states: Tensor,
        alibi: Tensor | None,
        attention_mask: Any,
        position_ids: Tensor | None = None,
        layer_past: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Return attention, [B, S, H] -> [B, S, H]; `alibi` is [B*h, 1, S] or [B, h, 1, S]."""
        query, key, value = (x.transpose(1, 2) for x in self._split_heads(self.query_key_value(hidden_states)))
        bias: dict[str, Any] = {}
        if alibi is None:
            assert position_embeddings is not None
            query, key = rotate(query, key, *position_embeddings)
        else:  # transformers' own SDPA passes over it, and has it in the mask
            bias = {"key_bias": alibi.view(query.shape[0], self.num_heads, 1, -1) * self.inv_norm_factor}
        if layer_past is not None:
            key, value = layer_past.update(key, value, self.layer_idx)
        output = self.attend(query, key, value, attention_mask, 1 / math.sqrt(self.head_dim), **bias)
        return self.dense(output.flatten(2)), None

    @property
    def probability_dropout(self) -> Any:
        """The module that drops probabilities, which transformers does with ALiBi alone."""
        return self.attention_dropout if self.config.alibi else NO_DROPOUT


def _keeps_class(config: Any) -> bool:
    """Keep eager ALiBi: transformers adds the bias twice there, and the reference is what it computes."""
    return bool(config.alibi) and config._attn_implementation == "eager"


def _refine_splits(config: Any, splits: dict[str, TensorSplit]) -> dict[str, TensorSplit]:
    """Let one key and one value head serve all queries (multi-query), or those of a group of the newer decoder."""
    if not (config.new_decoder_architecture or config.multi_query):
        return splits
    shared = config.hidden_size // config.num_attention_heads
    groups = config.num_kv_heads if config.new_decoder_architecture else 1
    projections = [name for name in splits if name.endswith(FUSED_PROJECTION)]
    return splits | {name: replace(splits[name], shared=shared, groups=groups) for name in projections}


FAMILY = Family(
    ("falcon",),
    attention=FamilyAttention(
        bias="keys",
        note="own calls of SDPA in transformers; ALiBi, or rotary positions without a bias",
        classes={FalconAttention: FalconInterfaceAttention},
        keeps_class=_keeps_class,
    ),
    tensor_splits=INTERLEAVED_BLOCK,
    per_head_arguments=("alibi",),
    refine_splits=_refine_splits,
    keeps_documents_apart=True,
    block=BlockTraits(parallel_residual=True),
)
