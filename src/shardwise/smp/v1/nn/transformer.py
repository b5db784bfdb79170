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

from shardwise.job.axes import Axis
from shardwise.kernels.attention.masks import to_additive_mask
from shardwise.smp.alibi import LARGEST, alibi_bias, alibi_slopes
from shardwise.smp.v1.nn.norms import FusedLayerNorm
from shardwise.smp.v1.session import state

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
    "_skip_allgather": "the engine places collectives",
    "_skip_scatter_and_merge": "the engine places collectives",
}
_named: set[str] = set()


def take_out(settings: dict[str, Any]) -> dict[str, Any]:
    """Return `settings` without those that have no effect, of which the ones that are set are named on rank 0."""
    first = not dist.is_initialized() or dist.get_rank() == 0
    for key in sorted(settings.keys() & WITHOUT_EFFECT.keys() - _named):
        if settings[key] and first and not key.startswith("_"):
            print(f"note: smp.nn: {key}={settings[key]!r} has no effect here: {WITHOUT_EFFECT[key]}.", file=sys.stderr)
            _named.add(key)
    return {key: value for key, value in settings.items() if key not in WITHOUT_EFFECT}


def refuse_unknown(name: str, settings: dict[str, Any]) -> None:
    """Raise TypeError for settings that nobody knows, as Python does."""
    if settings:
        raise TypeError(f"{name}.__init__() got an unexpected keyword argument {next(iter(settings))!r}")


def added_to_scores(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a mask that is true where attention looks as one that is added to scores; any other as it is."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return to_additive_mask(mask, dtype)


class Projection(nn.Linear):
    """`nn.Linear`, whose fresh weights are normal where a standard deviation is given."""

    def __init__(self, inputs: int, outputs: int, bias: bool, std: float | None) -> None:
        self.std = std
        super().__init__(inputs, outputs, bias=bias)

    def reset_parameters(self) -> None:
        """Normal weights and zero biases, or torch's own."""
        if self.std is None:
            super().reset_parameters()
            return
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


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
        cross_attention: keys and values are of other states than queries.
        use_alibi, alibi_bias_max: scores fall with the distance; see `alibi.py`.
        initializer_range: standard deviation of fresh weights, where `use_normal_initialization`.
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
        cross_attention: bool = False,
        use_alibi: bool = False,
        alibi_bias_max: int = LARGEST,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__()
        refuse_unknown(type(self).__name__, take_out(settings))
        self.fused, self.in_fp32, self.cross = flash_attention, attention_in_fp32, cross_attention
        self.alibi = alibi_slopes(num_attention_heads, alibi_bias_max) if use_alibi else []
        std = initializer_range if use_normal_initialization else None
        inner = num_attention_heads * attention_head_size
        self.head_size, self.causal, self.window = attention_head_size, causal_mask_size is not None, window
        self.scale = (1 / math.sqrt(attention_head_size) if scale_attention_scores else 1.0) / scale
        self.rotary_dim, self.rotary_base, self.interleaved = rotary_dim, rotary_base, rotary_interleaved
        self.query = Projection(hidden_size, inner, qkv_bias, std)
        self.key = Projection(hidden_size, inner, qkv_bias, std)
        self.value = Projection(hidden_size, inner, qkv_bias, std)
        self.dense = Projection(inner, hidden_size, dense_bias, std)
        self.attention_dropout, self.dropout = nn.Dropout(attention_dropout_prob), nn.Dropout(hidden_dropout_prob)
        self.pre_layernorm = FusedLayerNorm(hidden_size, eps=layernorm_epsilon) if pre_layernorm else None
        self.layernorm = FusedLayerNorm(hidden_size, eps=layernorm_epsilon) if post_layernorm else None

    def forward(self, hidden: Any, mask: Tensor | None = None, states: Tensor | None = None) -> Tensor:
        """`mask` is additive, or true where attention looks, and broadcasts to [B, heads, S, S].

        Cross attention looks at `states` [B, T, H]. SMP's tuples (hidden, mask), (hidden, states, mask) are taken too.
        """
        if isinstance(hidden, tuple):  # past hooks of tp_register, which stand in the place of this function
            taken = (hidden[0], hidden[-1], hidden[1]) if self.cross else hidden
            return DistributedAttentionLayer.forward(self, *taken)
        normed = hidden if self.pre_layernorm is None else self.pre_layernorm(hidden)
        total = hidden + self.attend(normed, mask, states)
        return total if self.layernorm is None else self.layernorm(total)

    def attend(self, hidden: Tensor, mask: Tensor | None, states: Tensor | None = None) -> Tensor:
        """Without norms and residual."""
        source = hidden if states is None else states
        query, key, value = (
            part(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for part, x in ((self.query, hidden), (self.key, source), (self.value, source))
        )
        if self.rotary_dim:
            query, key = self._rotate(query), self._rotate(key)
        if self.in_fp32 and query.dtype.itemsize < 4:
            query, key, value = query.float(), key.float(), value.float()
        mask = self._mask(mask, query) if states is None else added_to_scores(mask, query.dtype)
        if not self.fused or (self.training and self.attention_dropout.p):
            scores = (query * self.scale) @ key.transpose(-1, -2)
            scores = scores if mask is None else scores + mask
            mixed = self.attention_dropout(scores.softmax(-1)) @ value
        else:
            mixed = F.scaled_dot_product_attention(query, key, value, mask, scale=self.scale)
        return self.dropout(self.dense(mixed.to(hidden.dtype).transpose(1, 2).flatten(2)))

    def _mask(self, mask: Tensor | None, query: Tensor) -> Tensor | None:
        """The given mask as an addend, with what the layer's own rule hides."""
        least, mask = torch.finfo(query.dtype).min, added_to_scores(mask, query.dtype)
        if self.alibi:
            bias = self._distances(query)
            mask = bias if mask is None else torch.clamp(bias + mask.to(query.dtype), min=least)
        if not self.causal:
            return mask
        length = query.shape[-2]
        ones = torch.ones(length, length, dtype=torch.bool, device=query.device)
        visible = ones.tril() if not self.window else ones.tril() & ~ones.tril(-self.window)
        hidden_part = torch.zeros(length, length, dtype=query.dtype, device=query.device).masked_fill(~visible, least)
        return hidden_part if mask is None else torch.clamp(hidden_part + mask.to(query.dtype), min=least)

    def _distances(self, query: Tensor) -> Tensor:
        """[heads that are here, S, S]: what ALiBi takes off the scores."""
        local_heads = query.shape[1]
        first = state.layout.index(Axis.TENSOR) * local_heads if local_heads < len(self.alibi) else 0
        return alibi_bias(self.alibi[first : first + local_heads], query.shape[-2], query)

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
        attention_dropout_prob: accepted, as SMP's own layers pass it on.
        layernorm_epsilon, pre_layernorm, post_layernorm, initializer_range, use_normal_initialization: as of attention.
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
        attention_dropout_prob: float = 0.1,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__()
        refuse_unknown(type(self).__name__, take_out(settings))
        std = initializer_range if use_normal_initialization else None
        self.dense1 = Projection(hidden_size, intermediate_size, True, std)
        self.dense2 = Projection(intermediate_size, hidden_size, True, std)
        self.activation, self.dropout = ACT2FN[activation], nn.Dropout(hidden_dropout_prob)
        self.pre_layernorm = FusedLayerNorm(hidden_size, eps=layernorm_epsilon) if pre_layernorm else None
        self.layernorm = FusedLayerNorm(hidden_size, eps=layernorm_epsilon) if post_layernorm else None

    def forward(self, hidden: Tensor) -> Tensor:
        """With norms and residual."""
        total = hidden + self.transform(hidden if self.pre_layernorm is None else self.pre_layernorm(hidden))
        return total if self.layernorm is None else self.layernorm(total)

    def transform(self, hidden: Tensor) -> Tensor:
        """Without norms and residual."""
        transformed: Tensor = self.dropout(self.dense2(self.activation(self.dense1(hidden))))
        return transformed


class DistributedTransformerLayer(nn.Module):
    """One block: attention, then MLP, or both side by side.

    Args:
        parallel_attn_output: "" for one after the other; "own" and "shared": both read the block's input, through
            a norm of each one's own (GPT-NeoX) or through one norm (GPT-J).
        add_cross_attention: look at other states too, between attention and MLP.
        settings: those of DistributedAttentionLayer and DistributedTransformerOutputLayer.

    Raises:
        TypeError: a setting is unknown.
        ValueError: neither input nor output of the parts is normalized.
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
        use_normal_initialization: bool = False,
        parallel_attn_output: str = "",
        **settings: Any,
    ) -> None:
        super().__init__()
        if not (pre_layernorm or post_layernorm):
            raise ValueError("pre_layernorm=False, post_layernorm=False: one of them has to be on, or both")
        self.parallel = parallel_attn_output
        shared: dict[str, Any] = {
            "layernorm_epsilon": layernorm_epsilon, "hidden_dropout_prob": hidden_dropout_prob,
            "initializer_range": initializer_range, "use_normal_initialization": use_normal_initialization,
        }  # fmt: skip
        heads: dict[str, Any] = shared | {
            "num_attention_heads": num_attention_heads, "attention_head_size": attention_head_size,
            "hidden_size": hidden_size, "attention_dropout_prob": attention_dropout_prob,
            "pre_layernorm": pre_layernorm, "post_layernorm": post_layernorm,
        }  # fmt: skip
        self.attention = DistributedAttentionLayer(causal_mask_size=causal_mask_size, **heads, **settings)
        self.cross_attention = DistributedAttentionLayer(cross_attention=True, **heads) if add_cross_attention else None
        self.output = DistributedTransformerOutputLayer(
            hidden_size, intermediate_size, activation=activation,
            pre_layernorm=pre_layernorm and parallel_attn_output != "shared", post_layernorm=post_layernorm, **shared,
        )  # fmt: skip

    def forward(
        self, hidden: Any, mask: Tensor | None = None, states: Tensor | None = None, states_mask: Tensor | None = None
    ) -> Any:
        """[B, S, H], or SMP's tuple (hidden, mask), which is then what is returned.

        With cross attention it looks at `states` [B, T, H], and the tuple is (hidden, states, mask, states_mask).
        """
        if isinstance(hidden, tuple):
            return (DistributedTransformerLayer.forward(self, *tuple_arguments(hidden)), *hidden[1:])
        if not self.parallel:
            hidden = self.attention(hidden, mask)
            hidden = hidden if self.cross_attention is None else self.cross_attention(hidden, states_mask, states)
            return self.output(hidden)
        normed = hidden if self.attention.pre_layernorm is None else self.attention.pre_layernorm(hidden)
        other = normed if self.output.pre_layernorm is None else self.output.pre_layernorm(hidden)
        return self.output.transform(other) + self.attention.attend(normed, mask) + hidden


class DistributedTransformer(nn.Module):
    """A chain of blocks, `seq_layers`.

    Args:
        num_layers: blocks.
        windows: of each block, how far back attention sees; unset: everything.
        scales: of each block, by what its scores are divided.
        settings: of DistributedTransformerLayer; with both of its norms input and output are normalized as well.
    """

    def __init__(
        self, num_layers: int = 12, windows: list[int] | None = None, scales: list[float] | None = None, **settings: Any
    ) -> None:
        super().__init__()
        both = settings.get("pre_layernorm", False) and settings.get("post_layernorm", True)
        shape, eps = settings.get("hidden_size", 1024), settings.get("layernorm_epsilon", 1e-5)
        self.pre_layernorm = FusedLayerNorm(shape, eps=eps) if both else None
        self.seq_layers = nn.Sequential(
            *(
                DistributedTransformerLayer(
                    **settings, window=windows[i] if windows else 0, scale=scales[i] if scales else 1.0
                )
                for i in range(num_layers)
            )
        )
        self.layernorm = FusedLayerNorm(shape, eps=eps) if both else None

    def forward(
        self, hidden: Any, mask: Tensor | None = None, states: Tensor | None = None, states_mask: Tensor | None = None
    ) -> Any:
        """As DistributedTransformerLayer's."""
        if isinstance(hidden, tuple):
            return (DistributedTransformer.forward(self, *tuple_arguments(hidden)), *hidden[1:])
        hidden = hidden if self.pre_layernorm is None else self.pre_layernorm(hidden)
        for layer in self.seq_layers:
            hidden = layer(hidden, mask) if states is None else layer(hidden, mask, states, states_mask)
        return hidden if self.layernorm is None else self.layernorm(hidden)


def tuple_arguments(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return SMP's tuple (hidden, mask) or (hidden, states, mask, states_mask) as arguments."""
    return given if len(given) < 4 else (given[0], given[2], given[1], given[3])
