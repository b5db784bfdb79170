"""Toy configs of transformers' language models: some thousand parameters, whatever the model type.

A config's own defaults are kept but for its sizes, which are recognised by the names that families give them. Tests of
families, of layouts and of versions of transformers build their models from these.
"""

from __future__ import annotations

from typing import Any

VOCABULARY = 97
# Names of one size, over all families, by the toy's size.
NAMES_OF_SIZE: dict[int, tuple[str, ...]] = {
    VOCABULARY: (
        *("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size", "text_vocab_size", "n_words"),
        *("src_vocab_size", "tgt_vocab_size", "entity_vocab_size", "shape_vocab_size", "pronunciation_vocab_size"),
        "encoder_hash_byte_group_vocab",
    ),
    64: ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "max_sequence_length"),
    48: (
        *("dff", "dim_ff", "expert_ffn_hidden_size", "moe_shared_expert_intermediate_size"),
        *("shared_intermediate_size", "dense_intermediate_size"),
        *("intermediate_size", "n_inner", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size"),
        *("hidden_dim", "moe_intermediate_size", "shared_expert_intermediate_size", "mlp_hidden_size"),
    ),
    32: (
        *("hidden_size", "n_embd", "d_model", "dim", "emb_dim", "embedding_size", "word_embed_proj_dim"),
        *("entity_emb_size", "pronunciation_embed_dim", "shape_embed_dim", "d_latents", "hidden_size_global"),
    ),
    16: ("q_lora_rank", "kv_lora_rank", "mamba_d_state", "state_size", "ssm_state_size"),
    8: (
        *("head_dim", "d_kv", "attention_head_size", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
        *("linear_head_dim", "hidden_size_per_layer_input", "linear_key_head_dim", "linear_value_head_dim"),
        *("swa_head_dim", "index_head_dim", "mamba_head_dim", "mamba_chunk_size", "num_latents"),
    ),
    4: (
        *(
            "num_attention_heads",
            "n_head",
            "n_heads",
            "num_heads",
            "encoder_attention_heads",
            "decoder_attention_heads",
        ),
        *("num_encoder_attention_heads", "num_decoder_attention_heads", "linear_num_heads", "index_n_heads"),
        *("linear_num_value_heads", "swa_num_attention_heads", "num_self_attention_heads"),
        *("num_cross_attention_heads", "zero_expert_num"),
        *("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    ),
    2: (
        *("num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_experts_per_tok", "moe_topk"),
        *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"),
        *("num_decoder_layers", "num_encoder_layers", "linear_num_key_heads", "swa_num_key_value_heads"),
        "num_self_attends_per_block",
    ),
}
SIZES = {name: size for size, names in NAMES_OF_SIZE.items() for name in names}
# What else a family needs to be small.
LATENT: dict[str, Any] = {"num_key_value_heads": 4}  # multi-head latent attention has a key for every head
SPARSE: dict[str, Any] = {"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1}
EXTRAS: dict[str, dict[str, Any]] = {
    "axk2": {**LATENT, "first_k_dense_replace": 1},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {**LATENT, "first_k_dense_replace": 1, "num_experts_per_tok": 2},
    **{name: {**LATENT, **SPARSE} for name in ("axk1", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "sarvam_mla")},
    "bailing_hybrid": {
        **LATENT,
        "mlp_layer_types": ["dense", "sparse"],
        "num_experts_per_token": 2,
        "num_expert_group": 2,
        "topk_group": 1,
    },
    "beam": {"mlp_layer_types": ["dense", "sparse"], "n_group": 2, "topk_group": 1},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48},
    "dots1": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 48,
        "first_k_dense_replace": 1,
    },
    "gemma4_text": {
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 48,
        "global_head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    **dict.fromkeys(("longcat_flash", "minicpm3", "youtu"), LATENT),
    "unlimited_ocr_text": {**LATENT, "mlp_layer_types": ["dense", "sparse"], "sliding_window": 8},
    "xmod": {"default_language": "en_XX"},
    "lilt": {"hidden_size": 48, "channel_shrink_ratio": 2},
    "layoutlmv3": {"coordinate_size": 6, "shape_size": 4, "visual_embed": False},
    "perceiver": {"max_position_embeddings": 16},  # it has as many logits as positions
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
    },
    "dory": {
        "num_hidden_layers": 4,
        "layer_types": 2 * ["sliding_attention", "full_attention"],
        "n_input_layers": 1,
        "n_recurrent_layers": 2,
        "n_output_layers": 1,
    },
    "neomme": {
        "embedding_rank": 16,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
        },
    },
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "attn_layer_indices": [1]},
    "esm": {"vocab_size": VOCABULARY},
    "esmc": {"num_key_value_heads": 4},
    **{name: {"head_dim": 8} for name in ("hunyuan_v1_dense", "ministral")},
    **{name: {"d_inner": 48, "d_head": 8} for name in ("funnel", "xlnet")},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_ssm": 64},
    "mamba2": {"num_heads": 8, "chunk_size": 8},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {"mamba_num_heads": 8, "n_groups": 2, "chunk_size": 8},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [16, 16], "axial_pos_shape": [4, 4]},
    "gemma3n_text": {"num_kv_shared_layers": 0, "intermediate_size": 48},
    "glm4_moe_lite": {**LATENT, "mlp_layer_types": ["dense", "sparse"], "n_group": 2, "topk_group": 1},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "mamba_n_heads": 8, "mamba_d_head": 8},
    "bros": {"hidden_size": 64},
    "dots3_note_audio_encoder": {"adapter_input_size": 32, "adapter_out_dim": 32},
    "dots3_note_vision_encoder": {
        "mlp_layer_types": ["dense", "sparse"],
        "adapter_in_dim": 32,
        "adapter_out_dim": 32,
    },
    "dots3_note_text": {
        **LATENT,
        "mlp_layer_types": ["dense", "sparse"],
        "shared_experts_intermediate_size": 48,
        "index_n_heads": 4,
        "index_head_dim": 8,
        "per_layer_config": {"1": {"kv_lora_rank": 24, "head_dim": 16}},
    },
    **{name: {"moe_k": 2} for name in ("ernie4_5_moe", "ernie4_5_vl_moe_text")},
    "deepseek_ocr2_text": {"num_experts_per_tok": 2, "mlp_layer_types": ["dense", "sparse"]},
    "glm5_next_text": {**LATENT, "qk_rope_head_dim": 0, "mlp_layer_types": ["dense", "sparse"], "index_kpool": 4},
    "hunyuan_vl_text": {"head_dim": 8},
    "mistral4": {**LATENT, "head_dim": 16},
    "mistral_large4_text": LATENT,
    "step3p5": {
        "layer_types": ["sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "sliding_window": 8,
    },
    "qwen4_exp_text": {
        "hc_lowrank": 8,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "flint": {"mlp_only_layers": [0]},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2, "head_dim": 8},
    "kimi_linear": {**LATENT, "num_experts_per_token": 2, "layer_types": ["linear_attention", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "zamba": {"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "hybrid"]},
    "zamba2": {
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "hybrid_layer_ids": [1, 2],
        "chunk_size": 8,
    },
    "zaya": {"num_experts_per_tok": 1},
    "gptj": {"rotary_dim": 4},
    "codegen": {"rotary_dim": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "prophetnet": {"num_encoder_layers": 2, "num_decoder_layers": 2},
}


def toy_config(model_type: str, **overrides: Any) -> dict[str, Any]:
    """Return the `model.config` of a toy of `model_type`, ready for a Job.

    Args:
        model_type: a key of transformers' `CONFIG_MAPPING`.
        overrides: values that take the place of the toy's, or come beside them.

    Raises:
        KeyError: the installed transformers has no such model type.
    """
    from transformers import CONFIG_MAPPING

    return toy_of(CONFIG_MAPPING[model_type]()) | overrides


def toy_of(config: Any) -> dict[str, Any]:
    """Return the `model.config` of a toy in the place of a config of transformers."""
    return {"model_type": config.model_type, **_small(config), **EXTRAS.get(config.model_type, {})}


def language_model_types(task: str) -> list[str]:
    """Return the model types that the installed transformers has a head for; `task` as in `model.task`."""
    from shardwise.job.tasks import TASKS

    return sorted({config.model_type for config in TASKS[task].types()})


def _small(config: Any) -> dict[str, Any]:
    """Return the values to change of a config with its defaults, those of configs inside of it too."""
    fields = config.to_dict()
    named = (name for name in fields if name in SIZES and fields[name] is not None)
    values: dict[str, Any] = {name: like(fields[name], SIZES[name]) for name in named}
    if "num_layers" in values and "num_hidden_layers" in values:
        del values["num_hidden_layers"]
    if fields.get("is_encoder_decoder"):
        values["decoder_start_token_id"] = 1
    for name, value in fields.items():
        if name.endswith("token_id") and (not isinstance(value, int) or value >= VOCABULARY):
            values[name] = 1 + len(values) % 8
        elif name.endswith("layerdrop"):
            values[name] = 0.0
        elif name == "layer_types" and isinstance(value, list):
            values |= _layers_of_each_kind(value, values)
        inner = vars(config).get(name)
        if hasattr(inner, "to_dict"):
            values[name] = {**_small(inner), **EXTRAS.get(inner.model_type, {})}
            if name == "decoder" and hasattr(inner, "add_cross_attention"):
                values[name] |= {"is_decoder": True, "add_cross_attention": True}
    return values


def like(default: Any, size: Any) -> Any:
    """Return a toy's size as a config has its default: as often as there, where that is a list."""
    return [size] * len(default) if isinstance(default, list | tuple) and isinstance(size, int) else size


def _layers_of_each_kind(kinds: list[str], values: dict[str, Any]) -> dict[str, Any]:
    """Return the layers of a toy of a family whose layers are of several kinds, one of each."""
    different = list(dict.fromkeys(kinds))
    number = next((name for name in ("num_hidden_layers", "num_layers", "n_layer") if name in values), None)
    if len(different) < 2 or number is None:
        return {}
    return {"layer_types": different, number: len(different)}
