"""transformers' configs as settings of `smp.nn`'s modules, and the modules that take the place of their models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from shardwise.smp.v1.nn.language_model import DistributedTransformerLMHead
from shardwise.smp.v1.nn.transformer import DistributedTransformer


def _causal(config: Any) -> dict[str, Any]:
    hidden, heads = config.hidden_size, config.num_attention_heads
    return {
        "num_layers": config.num_hidden_layers,
        "num_attention_heads": heads,
        "attention_head_size": hidden // heads,
        "hidden_size": hidden,
        "vocab_size": config.vocab_size,
        "causal_mask_size": config.max_position_embeddings,
        "initializer_range": config.initializer_range,
        "pre_layernorm": True,
        "post_layernorm": False,
        "tie_lm_head": bool(config.tie_word_embeddings),
    }


def gpt2_settings(config: Any) -> dict[str, Any]:
    """Return the settings of a GPT2Config."""
    by_layer = config.scale_attn_by_inverse_layer_idx
    return _causal(config) | {
        "intermediate_size": config.n_inner or 4 * config.n_embd,
        "num_positions": config.n_positions,
        "attention_dropout_prob": config.attn_pdrop,
        "hidden_dropout_prob": config.resid_pdrop,
        "embedding_dropout_prob": config.embd_pdrop,
        "activation": config.activation_function,
        "layernorm_epsilon": config.layer_norm_epsilon,
        "scale_attention_scores": config.scale_attn_weights,
        "scales": [float(index + 1) for index in range(config.n_layer)] if by_layer else None,
    }


def gptj_settings(config: Any) -> dict[str, Any]:
    """Return the settings of a GPTJConfig."""
    return _causal(config) | {
        "intermediate_size": config.n_inner or 4 * config.n_embd,
        "num_positions": 0,
        "attention_dropout_prob": config.attn_pdrop,
        "hidden_dropout_prob": config.resid_pdrop,
        "embedding_dropout_prob": config.embd_pdrop,
        "activation": config.activation_function,
        "layernorm_epsilon": config.layer_norm_epsilon,
        "rotary_dim": config.rotary_dim or config.n_embd,
        "rotary_interleaved": True,
        "qkv_bias": False,
        "dense_bias": False,
        "lm_head_bias": True,
        "parallel_attn_output": "shared",
    }


def gpt_neo_settings(config: Any) -> dict[str, Any]:
    """Return the settings of a GPTNeoConfig."""
    return _causal(config) | {
        "intermediate_size": config.intermediate_size or 4 * config.hidden_size,
        "num_positions": config.max_position_embeddings,
        "attention_dropout_prob": float(config.attention_dropout),
        "hidden_dropout_prob": float(config.resid_dropout),
        "embedding_dropout_prob": float(config.embed_dropout),
        "activation": config.activation_function,
        "layernorm_epsilon": config.layer_norm_epsilon,
        "scale_attention_scores": False,
        "qkv_bias": False,
        "windows": [config.window_size if layer == "local" else 0 for layer in config.attention_layers],
    }


def gpt_neox_settings(config: Any) -> dict[str, Any]:
    """Return the settings of a GPTNeoXConfig."""
    rope = config.rope_parameters
    return _causal(config) | {
        "intermediate_size": config.intermediate_size,
        "num_positions": 0,
        "attention_dropout_prob": config.attention_dropout,
        "hidden_dropout_prob": config.hidden_dropout,
        "embedding_dropout_prob": config.hidden_dropout,
        "activation": config.hidden_act,
        "layernorm_epsilon": config.layer_norm_eps,
        "rotary_dim": int(config.hidden_size // config.num_attention_heads * rope.get("partial_rotary_factor", 0.25)),
        "rotary_base": rope["rope_theta"],
        "qkv_bias": config.attention_bias,
        "dense_bias": config.attention_bias,
        "parallel_attn_output": "own" if config.use_parallel_residual else "",
    }


def encoder_settings(config: Any) -> dict[str, Any]:
    """Return the settings of the encoder of a BertConfig or RobertaConfig."""
    return {
        "num_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "attention_head_size": config.hidden_size // config.num_attention_heads,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "attention_dropout_prob": config.attention_probs_dropout_prob,
        "hidden_dropout_prob": config.hidden_dropout_prob,
        "activation": config.hidden_act,
        "layernorm_epsilon": config.layer_norm_eps,
        "initializer_range": config.initializer_range,
    }


class DistributedEncoder(DistributedTransformer):
    """Takes the place of BERT's and RoBERTa's encoder."""

    def forward(  # type: ignore[override]
        self, hidden_states: Any, attention_mask: Tensor | None = None, **unused: Any
    ) -> Any:
        """As transformers' encoders."""
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=super().forward(hidden_states, attention_mask)
        )


# Class of transformers' -> (family, settings of its config, class that takes its place).
REPLACED: dict[str, tuple[str, Callable[[Any], dict[str, Any]], type[nn.Module]]] = {
    "GPT2LMHeadModel": ("gpt2", gpt2_settings, DistributedTransformerLMHead),
    "GPTJForCausalLM": ("gptj", gptj_settings, DistributedTransformerLMHead),
    "GPTNeoForCausalLM": ("gpt_neo", gpt_neo_settings, DistributedTransformerLMHead),
    "GPTNeoXForCausalLM": ("gpt_neox", gpt_neox_settings, DistributedTransformerLMHead),
    "BertEncoder": ("bert", encoder_settings, DistributedEncoder),
    "RobertaEncoder": ("roberta", encoder_settings, DistributedEncoder),
}


def distributed_module(module: nn.Module, **overrides: Any) -> nn.Module:
    """Return what takes the place of a module of transformers', with fresh weights; `given` overrides its settings."""
    family, settings, distributed_class = REPLACED[type(module).__name__]
    config: Any = module.config
    replacement = distributed_class(**(settings(config) | overrides))
    replacement.config, replacement.smp_family = config, family  # type: ignore[assignment]
    return replacement
