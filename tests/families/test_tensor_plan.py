"""What tensor parallelism may split, and the reason where it may not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.families import tensor_plan as plans

SMALL: dict[str, Any] = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 11}


def model(family: str, **settings: Any) -> nn.Module:
    with torch.device("meta"):
        made: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SMALL, **settings))
    return made


def test_a_region_with_parameters_that_the_plan_does_not_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """OPT's MLP lies in the block itself, beside its norms: entered there, residuals would be summed in backward."""
    opt = model("opt", ffn_dim=12, word_embed_proj_dim=8)
    splits, refusal = plans.tensor_plan(opt)
    assert splits["model.decoder.layers.0.fc1"].alone and not refusal
    careless = {name: plans.COLUMN if split.alone else split for name, split in plans.OWN["opt"].items()}
    monkeypatch.setitem(plans.OWN, "opt", careless)
    splits, refusal = plans.tensor_plan(opt)
    assert not splits and "layer_norm" in refusal


def test_models_without_a_plan_and_modules_of_ones_own_are_refused() -> None:
    assert plans.tensor_plan(model("bloom"))[1] == "there is no plan for bloom yet"
    assert plans.tensor_plan(nn.Linear(2, 2))[1].startswith("a module of model.factory")
    assert "not built yet" in plans.tensor_plan(model("mixtral", num_key_value_heads=2, intermediate_size=8))[1]
