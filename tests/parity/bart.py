"""Tiny encoder-decoders of BART's kind: tables or sinusoids of positions, one embedding for both stacks and head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from shardwise.job.schema import Job
from tests.parity.jobs import LENGTH, VOCABULARY, make_module_job, span_job


def sizes(blocks: tuple[int, int], dropout: float) -> dict[str, Any]:
    """Of a config, with blocks of encoder and decoder."""
    return {
        "d_model": 24, "encoder_layers": blocks[0], "decoder_layers": blocks[1],
        "encoder_attention_heads": 4, "decoder_attention_heads": 2, "encoder_ffn_dim": 13, "decoder_ffn_dim": 17,
        "dropout": dropout, "attention_dropout": dropout, "activation_dropout": dropout,
        "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "decoder_start_token_id": 2, "forced_eos_token_id": None,
    }  # fmt: skip


def make_bart(family: str = "bart", blocks: tuple[int, int] = (2, 2), dropout: float = 0.1, **more: Any) -> nn.Module:
    """A model of `family`; `more` of its config."""
    given = {"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, "use_cache": False, **sizes(blocks, dropout)}
    config = AutoConfig.for_model(family, **{**given, **more})
    model: nn.Module = AutoModelForSeq2SeqLM.from_config(config, attn_implementation="eager")
    return model


def bart_job(directory: str | Path, family: str = "bart", blocks: tuple[int, int] = (2, 2), **sections: Any) -> Job:
    """A tiny job of such a model, which comes from a factory, as its data does."""
    arguments = {"family": family, "blocks": list(blocks), **sections.pop("more", {})}
    model = {"factory": "tests.parity.bart:make_bart", "loss": None, "factory_arguments": arguments}
    data = {"factory": "tests.parity.jobs:Pairs", "sequence_length": LENGTH, **sections.pop("data", {})}
    return make_module_job(directory, model=model, data=data, **sections)


def bart_span_job(directory: str | Path, family: str, blocks: tuple[int, int] = (2, 2), **sections: Any) -> Job:
    """A tiny job of such a config, which fills in spans of text that are left out."""
    config = {"model_type": family, "max_position_embeddings": 20, **sizes(blocks, 0.1), **sections.pop("more", {})}
    return span_job(directory, model={"config": config}, **sections)
