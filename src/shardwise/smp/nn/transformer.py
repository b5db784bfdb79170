"""`smp.nn`'s transformer: ordinary modules with SMP's names, which the engine splits over tensor ranks.

A module here computes on whole tensors; `splits.py` says how the engine cuts it, as it does for every other model. The
same class serves all families: what they differ in (rotary positions, one norm for attention and MLP, windows) are
keywords of the layer.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from shardwise.smp.nn.norms import FusedLayerNorm

COMPILED = "the numbers are the same; model.compile fuses such steps"
# Keywords of scripts that change nothing here, and why; one that is set is named once on rank 0.
WITHOUT_EFFECT = {
    "fused_softmax": "torch's attention kernels hold the softmax",
    "fused_dropout": COMPILED,
    "fused_bias_gelu": COMPILED,
    "query_key_layer_scaling": "queries are scaled before the product and softmax is in fp32 in torch's kernels, so "
    "that no score overflows that a layer's number would have to divide",
    "fp32_residual_addition": "residuals are added in the compute dtype",
    "distribute_embedding": "embeddings are split by vocabulary where tensor ranks can share them",
    "zero_init": "weights never depend on the layout",
    "use_normal_initialization": "initializer_range says it",
    "_skip_allgather": "the engine places collectives",
    "_skip_scatter_and_merge": "the engine places collectives",
}
_named: set[str] = set()


def take_out(settings: dict[str, Any]) -> dict[str, Any]:
    """`settings` without those that have no effect, of which the ones that are set are named on rank 0."""
    first = not dist.is_initialized() or dist.get_rank() == 0
    for key in sorted(settings.keys() & WITHOUT_EFFECT.keys() - _named):
        if settings[key] and first and not key.startswith("_"):
            print(f"note: smp.nn: {key}={settings[key]!r} has no effect here: {WITHOUT_EFFECT[key]}.", file=sys.stderr)
            _named.add(key)
    return {key: value for key, value in settings.items() if key not in WITHOUT_EFFECT}


class DistributedAttentionLayer(nn.Module):
    """Multi-head attention with its norm and residual; [B, S, H] -> [B, S, H].

    Args:
        num_attention_heads, attention_head_size, hidden_size: of the whole layer, on all tensor ranks together.
        attention_dropout_prob, hidden_dropout_prob: of probabilities, and of the output.
        layernorm_epsilon: of the norms.
        causal_mask_size: set for attention that sees nothing behind its position.
        pre_layernorm, post_layernorm: whether input, or sum with the residual, is normalized.
        scale_attention_scores: divide scores by sqrt(attention_head_size).
        scale: divide them by this too.
        window: how far back attention sees; 0 for everything.
        rotary_dim, rotary_base, rotary_interleaved: rotary positions of so many features of a head (arXiv 2104.09864).
        qkv_bias, dense_bias: whether the projections have biases.
        flash_attention: scores stay inside of torch's kernels; off, and under dropout, they are plain products.
        attention_in_fp32: queries, keys and values of fewer bits are multiplied in fp32.
    """

    def __init__(
        self,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        causal_mask_size: int | None = None,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        scale_attention_scores: bool = True,
        scale: float = 1.0,
        window: int = 0,
        rotary_dim: int = 0,
        rotary_base: float = 10000.0,
        rotary_interleaved: bool = False,
        qkv_bias: bool = True,
        dense_bias: bool = True,
        flash_attention: bool = True,
        attention_in_fp32: bool = False,
    ) -> None:
        super().__init__()
        self.fused, self.in_fp32 = flash_attention, attention_in_fp32
        inner = num_attention_heads * attention_head_size
        self.head_size, self.causal, self.window = attention_head_size, causal_mask_size is not None, window
        self.scale = (1 / math.sqrt(attention_head_size) if scale_attention_scores else 1.0) / scale
        self.rotary_dim, self.rotary_base, self.interleaved = rotary_dim, rotary_base, rotary_interleaved
        self.query = nn.Linear(hidden_size, inner, bias=qkv_bias)
        self.key = nn.Linear(hidden_size, inner, bias=qkv_bias)
        self.value = nn.Linear(hidden_size, inner, bias=qkv_bias)
        self.dense = nn.Linear(inner, hidden_size, bias=dense_bias)
        self.attention_dropout, self.dropout = nn.Dropout(attention_dropout_prob), nn.Dropout(hidden_dropout_prob)
        self.pre_layernorm = FusedLayerNorm(hidden_size, eps=layernorm_epsilon) if pre_layernorm else None
        self.layernorm = FusedLayerNorm(hidden_size, eps=layernorm_epsilon) if post_layernorm else None

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """`mask` is additive, or true where attention looks, and broadcasts to [B, heads, S, S]."""
        total = hidden + self.attend(hidden if self.pre_layernorm is None else self.pre_layernorm(hidden), mask)
        return total if self.layernorm is None else self.layernorm(total)

    def attend(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """Without norms and residual."""
        query, key, value = (
            part(hidden).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        if self.rotary_dim:
            query, key = self._rotate(query), self._rotate(key)
        if self.in_fp32 and query.dtype.itemsize < 4:
            query, key, value = query.float(), key.float(), value.float()
        mask = self._mask(mask, query)
        if not self.fused or (self.training and self.attention_dropout.p):
            scores = (query * self.scale) @ key.transpose(-1, -2)
            scores = scores if mask is None else scores + mask
            found = self.attention_dropout(scores.softmax(-1)) @ value
        else:
            found = F.scaled_dot_product_attention(query, key, value, mask, scale=self.scale)
        return self.dropout(self.dense(found.to(hidden.dtype).transpose(1, 2).flatten(2)))

    def _mask(self, mask: Tensor | None, query: Tensor) -> Tensor | None:
        """The given mask as an addend, with what the layer's own rule hides."""
        least = torch.finfo(query.dtype).min
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, least)
        if not self.causal:
            return mask
        length = query.shape[-2]
        ones = torch.ones(length, length, dtype=torch.bool, device=query.device)
        seen = ones.tril() if not self.window else ones.tril() & ~ones.tril(-self.window)
        own = torch.zeros(length, length, dtype=query.dtype, device=query.device).masked_fill(~seen, least)
        return own if mask is None else torch.clamp(own + mask.to(query.dtype), min=least)

    def _rotate(self, heads: Tensor) -> Tensor:
        """Rotary positions on the first `rotary_dim` features of [B, heads, S, D], in fp32 tables."""
        width = 2 * -(-self.rotary_dim // 2)  # of an odd number transformers turns one more
        turned, rest = heads[..., :width], heads[..., width:]
        steps = torch.arange(0, self.rotary_dim, 2, dtype=torch.int64, device=heads.device).float()
        positions = torch.arange(heads.shape[-2], device=heads.device).float()
        angles = torch.outer(positions, 1.0 / self.rotary_base ** (steps / self.rotary_dim))
        if self.interleaved:
            angles = angles.repeat_interleave(2, -1)
            other = torch.stack((-turned[..., 1::2], turned[..., ::2]), -1).flatten(-2)
        else:
            angles = torch.cat((angles, angles), -1)
            first, second = turned.chunk(2, -1)
            other = torch.cat((-second, first), -1)
        return torch.cat((turned * angles.cos().to(heads.dtype) + other * angles.sin().to(heads.dtype), rest), -1)


class DistributedTransformerOutputLayer(nn.Module):
    """The MLP with its norm and residual; [B, S, H] -> [B, S, H].

    Args:
        hidden_size, intermediate_size: of the whole layer.
        hidden_dropout_prob: of the output.
        activation: a name of transformers'.
        layernorm_epsilon, pre_layernorm, post_layernorm: as of attention.
    """

    def __init__(
        self,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
    ) -> None:
        super().__init__()
        self.dense1, self.dense2 = nn.Linear(hidden_size, intermediate_size), nn.Linear(intermediate_size, hidden_size)
        self.activation, self.dropout = ACT2FN[activation], nn.Dropout(hidden_dropout_prob)
        self.pre_layernorm = FusedLayerNorm(hidden_size, eps=layernorm_epsilon) if pre_layernorm else None
        self.layernorm = FusedLayerNorm(hidden_size, eps=layernorm_epsilon) if post_layernorm else None

    def forward(self, hidden: Tensor) -> Tensor:
        """With norms and residual."""
        total = hidden + self.transform(hidden if self.pre_layernorm is None else self.pre_layernorm(hidden))
        return total if self.layernorm is None else self.layernorm(total)

    def transform(self, hidden: Tensor) -> Tensor:
        """Without norms and residual."""
        found: Tensor = self.dropout(self.dense2(self.activation(self.dense1(hidden))))
        return found


class DistributedTransformerLayer(nn.Module):
    """One block: attention, then MLP, or both side by side.

    Args:
        parallel_attn_output: "" for one after the other; "own" and "shared": both read the block's input, through
            a norm of each one's own (GPT-NeoX) or through one norm (GPT-J).
        settings: those of DistributedAttentionLayer and DistributedTransformerOutputLayer.

    Raises:
        TypeError: a setting is unknown, or one that is not built (ALiBi, cross attention).
    """

    def __init__(
        self,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        causal_mask_size: int | None = None,
        add_cross_attention: bool = False,
        initializer_range: float = 0.02,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        use_alibi: bool = False,
        parallel_attn_output: str = "",
        **settings: Any,
    ) -> None:
        super().__init__()
        if use_alibi or add_cross_attention:
            asked = "use_alibi" if use_alibi else "add_cross_attention"
            raise TypeError(f"{asked}=True is not built; use the model's own module instead of smp.nn's")
        self.parallel = parallel_attn_output
        settings = take_out(settings)
        shared: dict[str, Any] = {"layernorm_epsilon": layernorm_epsilon, "hidden_dropout_prob": hidden_dropout_prob}
        self.attention = DistributedAttentionLayer(
            num_attention_heads, attention_head_size, hidden_size, attention_dropout_prob,
            causal_mask_size=causal_mask_size, pre_layernorm=pre_layernorm, post_layernorm=post_layernorm,
            **shared, **settings,
        )  # fmt: skip
        self.output = DistributedTransformerOutputLayer(
            hidden_size, intermediate_size, activation=activation,
            pre_layernorm=pre_layernorm and parallel_attn_output != "shared", post_layernorm=post_layernorm, **shared,
        )  # fmt: skip

    def forward(self, hidden: Any, mask: Tensor | None = None) -> Any:
        """[B, S, H], or SMP's tuple (hidden, mask), which is then what is returned."""
        if isinstance(hidden, tuple):
            return (self(*hidden), *hidden[1:])
        if not self.parallel:
            return self.output(self.attention(hidden, mask))
        normed = hidden if self.attention.pre_layernorm is None else self.attention.pre_layernorm(hidden)
        other = normed if self.output.pre_layernorm is None else self.output.pre_layernorm(hidden)
        return self.output.transform(other) + self.attention.attend(normed, mask) + hidden


class DistributedTransformer(nn.Module):
    """A chain of blocks, `seq_layers`.

    Args:
        num_layers: blocks.
        windows: of each block, how far back attention sees; unset: everything.
        scales: of each block, by what its scores are divided.
        settings: of DistributedTransformerLayer.
    """

    def __init__(
        self, num_layers: int = 12, windows: list[int] | None = None, scales: list[float] | None = None, **settings: Any
    ) -> None:
        super().__init__()
        self.seq_layers = nn.Sequential(
            *(
                DistributedTransformerLayer(
                    **settings, window=windows[i] if windows else 0, scale=scales[i] if scales else 1.0
                )
                for i in range(num_layers)
            )
        )

    def forward(self, hidden: Any, mask: Tensor | None = None) -> Any:
        """[B, S, H], or SMP's tuple (hidden, mask)."""
        if isinstance(hidden, tuple):
            return (self(*hidden), *hidden[1:])
        for layer in self.seq_layers:
            hidden = layer(hidden, mask)
        return hidden
