"""Named models as Hugging Face configs, so that a preset is planned and trained like any other model."""

from __future__ import annotations

from typing import Any

from shardwise.planner.formulas.prediction import ModelShape

POSITIONS = 4096  # of presets with rotary positions, which cost no parameters


def preset_config(shape: ModelShape) -> dict[str, Any]:
    """The `model.config` of a preset: a Llama where the MLP is gated, a GPT-2 with learned positions, else a NeoX."""
    if shape.gated:
        return _rotary("llama", shape) | {"num_key_value_heads": shape.key_value_heads}
    if not shape.positions:
        return _rotary("gpt_neox", shape) | {"tie_word_embeddings": shape.tied}
    return {
        "model_type": "gpt2",
        "n_embd": shape.hidden,
        "n_layer": shape.layers,
        "n_head": shape.heads,
        "n_inner": shape.intermediate,
        "vocab_size": shape.vocabulary,
        "n_positions": shape.positions,
        **dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0),
    }


def _rotary(model_type: str, shape: ModelShape) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": POSITIONS,
    }
