"""Sizes of what sees and hears in toys, by the names that configs give them, and by family where names do not do."""

from __future__ import annotations

from typing import Any

from shardwise.testing.toy_samples import IMAGE_TOKEN

PIXELS, PATCH = 16, 4  # of an image's side and of a patch's
SIDE = PIXELS // PATCH  # of an image, in patches
FRAMES = 32  # of sound
FLAT = 12  # values of a patch that begins with its place
LARGER = 64  # pixels of a side, for convolutions that leave one of 32
SIZES: dict[str, Any] = {
    "image_size": PIXELS, "patch_size": PATCH, "depth": 2, "embed_dim": 16, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "out_hidden_size": 32, "num_position_embeddings": SIDE**2,
    "mm_tokens_per_image": 4, "window_size": 8, "fullatt_block_indexes": [1], "deepstack_visual_indexes": [1],
    "num_mel_bins": 8, "input_feat_per_channel": 8, "max_source_positions": FRAMES // 2, "max_target_positions": 64,
    "image_grid_pinpoints": [[PIXELS, PIXELS]], "projection_dim": 32,
    "resampler_n_heads": 4, "resampler_head_dim": 8, "resampler_depth": 2,
    "image_token_id": IMAGE_TOKEN, "image_token_index": IMAGE_TOKEN, "drop_path_rate": 0.0,
    "pos_emb_height": SIDE, "pos_emb_width": SIDE, "posemb_grid_size": SIDE, "max_image_size": PIXELS,
    "projection_hidden_size": 32, "projector_hidden_size": 32, "text_hidden_size": 32, "projection_hidden_dim": 48,
    "projection_intermediate_size": 48, "adapter_in_dim": 32, "adapter_out_dim": 32, "adapter_input_size": 32,
    "vision_hidden_size": 32, "moe_hidden_size": 32, "patch_embed_hidden_size": FLAT,
}  # fmt: skip
CODES, FIRST_CODE = 4, 5  # of images that become tokens, which no text has
SECTIONS = {"mrope_section": [1, 1, 2]}  # by time, height and width, of heads of 8
MROPE = {"rope_type": "default", "rope_theta": 1e4, **SECTIONS}
PYRAMID = {
    "num_encoder_blocks": 2, "depths": [1, 1], "hidden_sizes": [16, 32], "strides": [4, 2],
    "num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "drop_path_rate": 0.0,
}  # fmt: skip
SEAMLESS = {
    "feature_projection_input_dim": 8, "speech_encoder_layers": 2, "speech_encoder_attention_heads": 4,
    "speech_encoder_intermediate_size": 48, "speech_encoder_layerdrop": 0.0, "conv_depthwise_kernel_size": 3,
}  # fmt: skip
WAVES = {  # sound by its values, in few convolutions, nothing of it masked by chance
    "conv_dim": [8, 8], "conv_stride": [5, 4], "conv_kernel": [10, 4], "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "apply_spec_augment": False,
}  # fmt: skip
# What else a family needs to be small, or to see at all.
OF_FAMILIES: dict[str, dict[str, Any]] = {
    "swin": {"patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 4], "window_size": 2},
    "swinv2": {"patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 4], "window_size": 2},
    "convnext": {"patch_size": 2, "num_stages": 2, "hidden_sizes": [8, 16], "depths": [2, 2]},
    "convnextv2": {"patch_size": 2, "num_stages": 2, "hidden_sizes": [8, 16], "depths": [2, 2]},
    "resnet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2]},
    "bit": {"embedding_size": 16, "hidden_sizes": [32, 64], "depths": [2, 2], "num_groups": 4},
    "focalnet": {
        "embed_dim": 16, "hidden_sizes": [16, 32], "depths": [2, 2], "focal_levels": [2, 2], "focal_windows": [3, 3],
    },
    "hgnet_v2": {
        "embedding_size": 16, "depths": [1, 2], "hidden_sizes": [32, 64], "stem_channels": [3, 8, 16],
        "stage_in_channels": [16, 32], "stage_mid_channels": [8, 16], "stage_out_channels": [32, 64],
        "stage_num_blocks": [1, 2], "stage_downsample": [False, True], "stage_downsample_strides": [2, 2],
        "stage_light_block": [False, True], "stage_kernel_size": [3, 5], "stage_numb_of_layers": [2, 2],
    },
    "poolformer": {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 2, 1]},
    "swiftformer": {"embed_dims": [8, 16, 16, 32], "depths": [1, 1, 2, 1]},
    "textnet": {
        "stem_out_channels": 8, "hidden_sizes": [8, 16, 16], "conv_layer_strides": [[1, 2], [2, 1]],
        "conv_layer_kernel_sizes": [[[3, 3], [3, 1]], [[1, 3], [3, 3]]],
    },
    "mobilevit": {"hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 16, 24, 32, 64]},
    **{name: {"depth_multiplier": 0.125} for name in ("mobilenet_v1", "mobilenet_v2")},
    "regnet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2], "groups_width": 8},
    "cvt": {
        "patch_sizes": [3, 3], "patch_stride": [2, 2], "patch_padding": [1, 1], "embed_dim": [16, 32],
        "num_heads": [1, 2], "depth": [1, 2], "mlp_ratio": [2.0, 2.0], "attention_drop_rate": [0.0, 0.0],
        "drop_rate": [0.0, 0.0], "drop_path_rate": [0.0, 0.0], "qkv_bias": [True, True], "cls_token": [False, True],
        "qkv_projection_method": ["dw_bn", "dw_bn"], "kernel_qkv": [3, 3], "padding_kv": [1, 1], "stride_kv": [2, 2],
        "padding_q": [1, 1], "stride_q": [1, 1],
    },
    "perceiver": {"architectures": ["PerceiverForImageClassificationLearned"]},
    "deit": {"architectures": ["DeiTForImageClassification"]},
    "donut-swin": {"patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 4], "window_size": 2},
    "efficientnet": {  # whose last width is 1280 by the coefficient
        "width_coefficient": 0.05, "depth_coefficient": 0.3, "hidden_dim": 64, "drop_connect_rate": 0.0,
    },
    "hiera": {
        "patch_size": [7, 7], "image_size": [PIXELS, PIXELS], "embed_dim": 16, "depths": [1, 1], "num_heads": [1, 2],
        "num_query_pool": 1, "masked_unit_size": [2, 2], "masked_unit_attention": [True, False],
    },
    "levit": {
        "architectures": ["LevitForImageClassification"],
        "image_size": 2 * LARGER, "patch_size": 16, "hidden_sizes": [32, 48, 64], "num_attention_heads": [2, 2, 2],
        "depths": [1, 1, 1], "key_dim": [8, 8, 8], "drop_path_rate": 0,
    },
    "mobilevitv2": {
        "image_size": LARGER, "patch_size": 2, "n_attn_blocks": [1, 1, 1], "base_attn_unit_dims": [16, 16, 16],
        "width_multiplier": 0.25,
    },
    "pvt": {**PYRAMID, "patch_sizes": [4, 2], "sequence_reduction_ratios": [2, 1]},
    **{name: {**PYRAMID, "patch_sizes": [7, 3], "sr_ratios": [2, 1]} for name in ("pvt_v2", "segformer")},
    "siglip2": {"vision_config": {"num_patches": SIDE**2}},
    "moonshine": {
        "encoder_num_hidden_layers": 2, "decoder_num_hidden_layers": 2, "encoder_num_attention_heads": 4,
        "decoder_num_attention_heads": 4,
    },
    "moonshine_streaming": {"num_key_value_heads": 4},
    "seamless_m4t": {**SEAMLESS, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4},
    "seamless_m4t_v2": SEAMLESS,
    "speecht5": WAVES,
    "speech-encoder-decoder": {
        "pad_token_id": 0,
        "encoder": {"model_type": "wav2vec2", **WAVES},
        "decoder": {"model_type": "bert", "is_decoder": True, "add_cross_attention": True},
    },
    "apertus1p5": {
        "image_token_offset": FIRST_CODE, "audio_token_offset": FIRST_CODE + CODES, "audio_token_id": 4,
        "audio_config": {
            "model_type": "wavtokenizer_encoder", "hidden_size": 32, "codebook_dim": 32, "codebook_size": CODES,
            "num_filters": 2, "num_lstm_layers": 1,
        },
        "vision_config": {
            "codebook_size": CODES, "base_channels": 32, "channel_multiplier": [1, 1, 1], "resolution": PIXELS,
            "num_res_blocks": 1, "embed_dim": 16, "latent_channels": 16, "attn_resolutions": [PIXELS // 2],
        },
    },
    "aria": {"projector_patch_to_query_dict": {SIDE**2: 4}},
    "chameleon": {
        "vocabulary_map": {"<image>": IMAGE_TOKEN}
        | {f"IMGIMG{'ABCD'[code]}Z": FIRST_CODE + code for code in range(CODES)},
        "vq_config": {
            "num_embeddings": CODES, "base_channels": 32, "channel_multiplier": [1, 1, 1], "resolution": PIXELS,
            "num_res_blocks": 1, "latent_channels": 16,
        },
    },
    "cohere_compass": {"text_config": {"rope_parameters": {"full_attention": MROPE}}},
    "deepseek_ocr2": {
        "vision_config": {
            "sam_config": {"downsample_channels": [16, 32], "global_attn_indexes": [1], "output_channels": 16}
        }
    },
    "deepseek_vl_hybrid": {"high_res_vision_config": {"global_attn_indexes": [1], "output_channels": 16}},
    "dots3_note": {
        "vision_config": {"num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"]},
        "audio_config": {"downsample_hidden_size": 8},
    },
    "emu3": {
        "vocabulary_map": {"<image>": IMAGE_TOKEN, "<|extra_200|>": 4}
        | {f"<|visual token {code:06}|>": FIRST_CODE + code for code in range(CODES)},
        "vq_config": {
            "codebook_size": CODES, "base_channels": 32, "channel_multiplier": [1, 1, 1], "num_res_blocks": 1,
            "embed_dim": 4, "attn_resolutions": [1],
        },
    },
    "florence2": {
        "vision_config": {
            "depths": [1, 1], "patch_size": [3, 3], "patch_stride": [2, 2], "patch_padding": [1, 1], "window_size": 2,
            "patch_prenorm": [False, True], "embed_dim": [16, 32], "num_heads": [2, 4], "num_groups": [2, 4],
        }
    },
    "gemma4": {
        "vision_config": {
            "model_type": "gemma4_vision", "hidden_size": 32, "head_dim": 8, "num_attention_heads": 4,
            "num_hidden_layers": 2, "num_key_value_heads": 4, "pooling_kernel_size": 2, "position_embedding_size": 16,
        }
    },
    "gemma4_unified": {
        "vision_config": {
            "model_type": "gemma4_unified_vision", "patch_size": PATCH // 2, "pooling_kernel_size": 2,
            "mm_embed_dim": 32, "mm_posemb_size": SIDE**2, "output_proj_dims": 32,
        }
    },
    "glm4v_moe": {"text_config": {"partial_rotary_factor": 1.0}},
    "granite4_vision": {
        "vision_config": {"hidden_size": 64, "num_attention_heads": 4}, "text_config": {"num_hidden_layers": 5},
        "deepstack_layer_map": [[-2, 0]], "spatial_target_layers": [1, 2, 3, 4], "downsample_rate": "2/4",
        "qformer_config": {
            "model_type": "blip_2_qformer", "hidden_size": 64, "encoder_hidden_size": 64, "num_attention_heads": 1,
        },
    },
    "granite_docling": {"vision_config": {"scale_factor": 2}},
    "idefics": {"alpha_initializer": "ones", "freeze_text_layers": False, "freeze_vision_layers": False},
    **{name: {"image_token_index": IMAGE_TOKEN, "num_query_tokens": 4} for name in ("blip-2", "instructblip")},
    "instructblipvideo": {"video_token_index": IMAGE_TOKEN, "num_query_tokens": 4},
    **{
        name: {
            "latent_query_num": 4, "text_config": {"embed_dim": 32, "layers": 2, "attention_heads": 4},
            "vision_config": {"max_num_patches": SIDE**2} if name == "kosmos-2.5" else {},
        }
        for name in ("kosmos-2", "kosmos-2.5")
    },
    "janus": {"vq_config": {"base_channels": 32, "channel_multiplier": [1, 1], "num_embeddings": CODES}},
    "llama4": {
        "vision_config": {
            "intermediate_size": 128, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32,
        }
    },
    "mllama": {
        "vision_config": {
            "attention_heads": 4, "num_global_layers": 1, "intermediate_layers_indices": [0], "vision_output_dim": 64,
            "supported_aspect_ratios": [[1, 1]], "max_num_tiles": 1,
        },
        "text_config": {"cross_attention_layers": [1]},
    },
    "molmo2": {"image_patch_id": IMAGE_TOKEN, "adapter_config": {"vision_feature_layer": [1, 0]}},
    "muse_glimmer": {"out_hidden_size": 128},
    "muse_spark": {
        "out_hidden_size": 128,
        "audio_config": {
            "num_hidden_layers": 2, "patch_sizes": [16, 6], "hidden_sizes": [8, 16], "depths": [1, 1],
        },
    },
    "nemotron_h_omni": {
        "vision_config": {"model_type": "radio", "video_temporal_patch_size": 2, "max_img_size": PIXELS}
    },
    "paddleocr_vl": {"text_config": {"rope_parameters": MROPE}},
    "pix2struct": {"vision_config": {"seq_len": SIDE**2}},
    "pp_formulanet": {
        "vision_config": {
            "image_size": 2 * PIXELS, "output_channels": 16, "post_conv_in_channels": 16, "post_conv_mid_channels": 16,
            "mlp_dim": 48, "post_conv_out_channels": 32, "decoder_hidden_size": 32, "global_attn_indexes": [1],
        }
    },
    "qwen2_5_omni_thinker": {"vision_start_token_id": 4},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 4},
    "step3p7": {"vision_config": {"image_size": 2 * PIXELS}},
    "unlimited_ocr": {
        "vision_config": {
            "sam_config": {
                "downsample_channels": [16, 32], "global_attn_indexes": [1], "output_channels": 16, "mlp_dim": 48,
            }
        }
    },
    "vision-encoder-decoder": {
        "encoder": {"model_type": "vit"},
        "decoder": {"model_type": "bert", "is_decoder": True, "add_cross_attention": True},
    },
    "vipllava": {"vision_feature_layers": [-1, -2]},
}  # fmt: skip
