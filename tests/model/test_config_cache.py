"""What follows from a config is found once; another config, or a module that was exchanged, is another model."""

from __future__ import annotations

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from shardwise.model.config_cache import MOST_RESULTS, once_a_config


def model(width: int = 4) -> GPT2LMHeadModel:
    with torch.device("meta"):
        return GPT2LMHeadModel(GPT2Config(n_embd=width, n_head=1, n_layer=1, vocab_size=8, n_positions=8))


def test_a_result_is_found_once_a_config() -> None:
    calls = []

    @once_a_config
    def width_of(model: PreTrainedModel, unit: str) -> str:
        calls.append(model)
        return f"{model.config.n_embd} {unit}"

    assert width_of(model(), "features") == width_of(model(), "features") == "4 features" and len(calls) == 1
    assert width_of(model(8), "features") == "8 features" and len(calls) == 2
    exchanged = model()
    exchanged.transformer.h[0].mlp = nn.Identity()
    width_of(exchanged, "features")
    assert len(calls) == 3


def test_the_oldest_results_are_dropped() -> None:
    calls = []
    counted = once_a_config(lambda model: calls.append(model))
    for width in range(1, MOST_RESULTS + 2):
        counted(model(width))
    counted(model(1))
    assert len(calls) == MOST_RESULTS + 2
