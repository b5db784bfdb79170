"""`smp.nn.DistributedTransformerLMHead`: embeddings, blocks and head, for causal and masked language models."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

from shardwise.smp.v1.nn.norms import FusedLayerNorm
from shardwise.smp.v1.nn.transformer import DistributedTransformer


class DistributedTransformerLMHead(nn.Module):
    """A language model.

    Args:
        num_layers, num_attention_heads, attention_head_size, hidden_size, intermediate_size: of the whole model.
        vocab_size, num_positions, num_token_types: of the embeddings; 0 positions or types: no such embedding.
        attention_dropout_prob, hidden_dropout_prob, embedding_dropout_prob: the last is the second where unset.
        causal_mask_size: set for a causal model.
        add_lm_head: whether there is a head; its weight is the word embedding's where `tie_lm_head`.
        lm_head_bias: whether the head has a bias.
        initializer_range: standard deviation of fresh weights.
        pre_layernorm, post_layernorm: of the blocks; with the first there is a last `layernorm`.
        settings: of DistributedTransformerLayer.
    """

    def __init__(
        self,
        num_layers: int = 12,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        vocab_size: int = 30522,
        num_positions: int = 1024,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        num_token_types: int = 0,
        causal_mask_size: int | None = None,
        add_lm_head: bool = True,
        initializer_range: float = 0.02,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        embedding_dropout_prob: float | None = None,
        tie_lm_head: bool = True,
        lm_head_bias: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__()
        self.causal, self.initializer_range = causal_mask_size is not None, initializer_range
        self.post_layernorm = post_layernorm
        self.num_attention_heads = num_attention_heads
        self.word_embedding = nn.Embedding(vocab_size, hidden_size)
        self.position_embedding = nn.Embedding(num_positions, hidden_size) if num_positions else None
        self.token_type_embedding = nn.Embedding(num_token_types, hidden_size) if num_token_types else None
        self.dropout = nn.Dropout(hidden_dropout_prob if embedding_dropout_prob is None else embedding_dropout_prob)
        self.transformer = DistributedTransformer(
            num_layers,
            num_attention_heads=num_attention_heads,
            attention_head_size=attention_head_size,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            attention_dropout_prob=attention_dropout_prob,
            hidden_dropout_prob=hidden_dropout_prob,
            activation=activation,
            layernorm_epsilon=layernorm_epsilon,
            causal_mask_size=causal_mask_size,
            pre_layernorm=pre_layernorm,
            post_layernorm=post_layernorm,
            **settings,
        )
        self.layernorm = FusedLayerNorm(hidden_size, eps=layernorm_epsilon)
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=lm_head_bias) if add_lm_head else None
        if self.lm_head is not None and tie_lm_head:
            self.lm_head.weight = self.word_embedding.weight
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        """Normal weights, zero biases, norms of one."""
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=self.initializer_range)
        elif isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
        if isinstance(module, (nn.Linear, nn.LayerNorm)) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(
        self,
        input_ids: Any,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        **unused: Any,
    ) -> Any:
        """Logits and loss of [B, S] ids, with transformers' arguments and output.

        SMP's one tuple (input_ids, attention_mask, token_type_ids, position_ids, labels), with cross attention
        (..., cross_states, cross_mask, labels), is taken too, in which a mask has ones where nothing is seen; the
        logits alone, or (loss, logits), are then returned; without a head hidden states [B, S, H], either way.
        """
        if isinstance(input_ids, tuple):
            ids, hidden_from, types, positions, *cross, wanted = input_ids
            states, their_mask = cross or (None, None)
            masks = (None if mask is None else 1 - mask for mask in (hidden_from, their_mask))
            forward = DistributedTransformerLMHead.forward  # past hooks of tp_register, which stand in its place
            output = forward(self, ids, next(masks), types, positions, wanted, states, next(masks))
            if self.lm_head is None:
                return output
            return output.logits if wanted is None else (output.loss, output.logits)
        mask, their_mask = (
            None if mask is None else mask[:, None, None, :] != 0 for mask in (attention_mask, encoder_attention_mask)
        )
        hidden = self._embed(input_ids, token_type_ids, position_ids)
        hidden = self.transformer(hidden, mask, encoder_hidden_states, their_mask)
        hidden = hidden if self.post_layernorm else self.layernorm(hidden)
        if self.lm_head is None:
            return hidden
        logits = self.lm_head(hidden)
        loss: Any = None if labels is None else self._loss(logits, labels)
        return CausalLMOutput(loss=loss, logits=logits)

    def _embed(self, ids: Tensor, types: Tensor | None, positions: Tensor | None) -> Tensor:
        hidden: Tensor = self.word_embedding(ids)
        if self.position_embedding is not None:
            positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0) if positions is None else positions
            hidden = hidden + self.position_embedding(positions)
        if self.token_type_embedding is not None:
            hidden = hidden + self.token_type_embedding(torch.zeros_like(ids) if types is None else types)
        if self.post_layernorm:  # such blocks want normalized input
            hidden = self.layernorm(hidden)
        dropped: Tensor = self.dropout(hidden)
        return dropped

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy in fp32; a causal model's logits are those of the next token."""
        if self.causal:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten().to(logits.device))
