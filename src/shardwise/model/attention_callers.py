"""Attention modules that bring their own products, made to call transformers' AttentionInterface as all others do.

transformers has no SDPA path for GPT-Neo and Bloom, up to 5.23 none for GPT-J, and one of Falcon's own. An adapter is
a subclass that takes the place of the module's class on the meta device; parameters, buffers and names stay. After that
these families are like any other: the probe sees their attention, kernels can be chosen, sequences can be split.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.models.bloom.modeling_bloom import BloomAttention, dropout_add
from transformers.models.falcon.modeling_falcon import FalconAttention
from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb as falcon_rotary
from transformers.models.gpt_neo.modeling_gpt_neo import GPTNeoSelfAttention
from transformers.models.gptj.modeling_gptj import GPTJAttention

WINDOW = "local_window"  # argument of a call whose mask does not know it
NOTHING = nn.Dropout(0.0)


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
    """These families' own arithmetic: [B, h, S, d] -> [B, S, h, d], in the dtypes that transformers computes in."""
    wide = module.scores_in or query.dtype
    scores = (query.to(wide) @ key.to(wide).mT) * scaling  # type: ignore[arg-type]
    if key_bias is not None:
        scores = scores + key_bias
    if kwargs.get(WINDOW):
        rows, columns = (torch.arange(size, device=query.device) for size in scores.shape[-2:])
        far = columns <= rows.unsqueeze(1) + (len(columns) - len(rows)) - kwargs[WINDOW]
        scores = scores.masked_fill(far, torch.finfo(scores.dtype).min)
    if attention_mask is not None:
        scores = scores + attention_mask
    softmax_in: Any = module.softmax_in
    weights = scores.softmax(-1, dtype=softmax_in).to(value.dtype)
    weights = module.attention_drop(weights)  # type: ignore[operator]
    return (weights @ value).transpose(1, 2), weights


class Adapter(nn.Module):
    """What adapters share: the call of the interface, with the dropout module's probability and name.

    `scores_in` and `softmax_in` are the dtypes of the eager arithmetic; None is that of its input.
    """

    config: Any
    scores_in: torch.dtype | None = None
    softmax_in: torch.dtype | None = None

    @property
    def attention_drop(self) -> Any:
        """The module that drops probabilities."""
        return self.attn_dropout if hasattr(self, "attn_dropout") else self.attention_dropout

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float, **more: Any) -> Tensor:
        """[B, h, S, d] -> [B, S, h, d]."""
        drop = self.attention_drop
        interface = AttentionInterface().get_interface(self.config._attn_implementation, eager_attention_forward)
        output: Tensor = interface(
            self,
            query,
            key,
            value,
            mask,
            scaling=scale,
            dropout=drop.p if self.training else 0.0,
            dropout_name=getattr(drop, "name", None),
            **more,
        )[0]
        return output


class GPTJInterface(GPTJAttention, Adapter):
    """GPT-J's attention through the interface, which it calls by itself from transformers 5.24 on."""

    scores_in = torch.float32

    def _attn(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None) -> tuple[Tensor, None]:
        divisor: Any = self.scale_attn
        return self.attend(query, key, value, attention_mask, 1 / divisor).transpose(1, 2), None


class GPTNeoInterface(GPTNeoSelfAttention, Adapter):
    """GPT-Neo's: scores are not scaled; local layers see a window, which their mask does not know."""

    scores_in = torch.float32

    def _attn(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None) -> tuple[Tensor, None]:
        local = {WINDOW: self.config.window_size} if self.attention_type == "local" else {}
        return self.attend(query, key, value, attention_mask, 1.0, **local).transpose(1, 2), None


class BloomInterface(BloomAttention, Adapter):
    """Bloom's: ALiBi is a bias on keys."""

    is_causal = True
    softmax_in = torch.float32

    def forward(
        self,
        hidden_states: Tensor,
        residual: Tensor,
        alibi: Tensor,
        attention_mask: Any,
        layer_past: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """[B, S, H] -> [B, S, H], the residual added; `alibi` is [B*h, 1, S]."""
        query, key, value = self._reshape(self.query_key_value(hidden_states))
        if layer_past is not None:
            key, value = layer_past.update(key, value, self.layer_idx)
        bias = alibi.view(query.shape[0], self.num_heads, 1, -1)
        output = self.attend(query, key, value, attention_mask, self.inv_norm_factor, key_bias=bias)
        output = self.dense(output.flatten(2))
        return dropout_add(output, residual, self.hidden_dropout, self.training), None


class FalconInterface(FalconAttention, Adapter):
    """Falcon's: rotary positions, and no dropout of probabilities (as transformers has it), or ALiBi."""

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
        """[B, S, H] -> [B, S, H]; `alibi` is [B*h, 1, S] or [B, h, 1, S]."""
        query, key, value = (x.transpose(1, 2) for x in self._split_heads(self.query_key_value(hidden_states)))
        more: dict[str, Any] = {}
        if alibi is None:
            assert position_embeddings is not None
            query, key = falcon_rotary(query, key, *position_embeddings)
        else:  # transformers' own SDPA passes over it, and has it in the mask
            more = {"key_bias": alibi.view(query.shape[0], self.num_heads, 1, -1) * self.inv_norm_factor}
        if layer_past is not None:
            key, value = layer_past.update(key, value, self.layer_idx)
        scale = 1 / math.sqrt(self.head_dim)
        output = self.attend(query, key, value, attention_mask, scale, **more)
        return self.dense(output.flatten(2)), None

    @property
    def attention_drop(self) -> Any:
        """Dropout of probabilities is ALiBi's alone."""
        return self.attention_dropout if self.config.alibi else NOTHING


ADAPTERS: dict[type[nn.Module], type[nn.Module]] = {
    GPTNeoSelfAttention: GPTNeoInterface,
    BloomAttention: BloomInterface,
    FalconAttention: FalconInterface,
}
OWN_PRODUCTS = ["gpt_neo", "bloom"]  # transformers has nothing but eager for them
if hasattr(GPTJAttention, "_attn"):
    ADAPTERS[GPTJAttention] = GPTJInterface
    OWN_PRODUCTS.append("gptj")


def adapt(model: nn.Module) -> None:
    """Give the model's attention modules the class that calls the interface; weights stay.

    Falcon's eager ALiBi stays as it is: transformers adds the bias twice there, and the reference is what it computes.
    """
    config: Any = getattr(model, "config", None)
    for module in model.modules():
        twice = isinstance(module, FalconAttention) and config.alibi and config._attn_implementation == "eager"
        if type(module) in ADAPTERS and not twice:
            module.__class__ = ADAPTERS[type(module)]
            module.config = config  # Bloom's have none
