"""Translation of GPT-2's weights, under all the names it has had."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from shardwise.smp.v1.nn.huggingface.models import gpt2_settings
from shardwise.smp.v1.nn.huggingface.translation import to_hf, to_smp


def translate_hf_state_dict_to_smdistributed_gpt2(
    state_dict: Any, max_seq_len: int | None = None, heads: int | None = None
) -> dict[str, Tensor]:
    """transformers' weights by `smp.nn`'s names; `state_dict` is emptied meanwhile."""
    return to_smp(state_dict, "gpt2", heads)


def translate_state_dict_to_hf_gpt2(
    state_dict: Any, max_seq_len: int | None = None, heads: int | None = None
) -> dict[str, Tensor]:
    """`smp.nn`'s weights by transformers' names; `state_dict` is emptied meanwhile."""
    return to_hf(state_dict, "gpt2", heads)


translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gpt2
translate_hf_gpt2_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gpt2


def translate_hf_block_state_dict_to_smdistributed(
    state_dict: Any, max_seq_len: int | None = None
) -> dict[str, Tensor]:
    """Weights of one block, or of those in a whole model, by the names inside of `DistributedTransformerLayer`.

    What has these names is returned as it is: scripts translate a file that may have been written by either.
    """
    if any(name.endswith("attention.query.weight") for name in state_dict):
        return dict(state_dict)
    return _blocks(state_dict, to_smp)


def translate_layer_state_dict_to_hf_gpt2_block(state_dict: Any, max_seq_len: int | None = None) -> dict[str, Tensor]:
    """The way back."""
    return _blocks(state_dict, to_hf)


def _blocks(weights: Any, translate: Callable[[Any, str], dict[str, Tensor]]) -> dict[str, Tensor]:
    if any(name.startswith("transformer.h.") for name in weights):
        return translate(weights, "gpt2_blocks")
    alone = "transformer.h.0."
    translated = translate({alone + name: value for name, value in weights.items()}, "gpt2_blocks")
    return {name.removeprefix(alone): value for name, value in translated.items()}


def get_hf_gpt2_transformer_layer_hooks() -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """(init, forward, return) hooks that put a `DistributedTransformerLayer` in the place of a GPT2Block."""

    def init(config: Any, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        outer = ("num_layers", "vocab_size", "num_positions", "embedding_dropout_prob", "tie_lm_head", "scales")
        return (), {name: value for name, value in gpt2_settings(config).items() if name not in outer}

    def forward(hidden: Any, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (hidden, kwargs.get("attention_mask")), {}

    return init, forward, lambda output: output
