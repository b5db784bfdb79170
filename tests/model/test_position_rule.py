"""Rules by which models count positions: from 0, behind the padding id, or in a way that ranks cannot be told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from shardwise.job.axes import Axis
from shardwise.job.schema import Job
from shardwise.model.build import build_model
from shardwise.model.discover import discover
from shardwise.model.position_rule import PositionRule, find_position_rule
from shardwise.testing.toy_configs import toy_config


def masked_job(model_type: str, **config: Any) -> Job:
    return Job.model_validate({"model": {"config": toy_config(model_type, **config), "task": "masked_lm"}})


@pytest.mark.parametrize(
    "model_type, block, padding",
    [
        ("bert", "bert.encoder.layer.0", None),
        ("esm", "esm.encoder.layer.0", 1),
        ("roberta", "roberta.encoder.layer.0", 1),
    ],
)
def test_rules_are_found(model_type: str, block: str, padding: int | None) -> None:
    """ESM's function stands in its file, RoBERTa's in its class."""
    model = build_model(masked_job(model_type, pad_token_id=1))
    assert isinstance(model, PreTrainedModel)
    assert find_position_rule(model, block) == PositionRule(padding)


def test_rotary_positions_count_from_zero_in_the_same_model() -> None:
    model = build_model(masked_job("esm", pad_token_id=1, mask_token_id=3, position_embedding_type="rotary"))
    assert isinstance(model, PreTrainedModel)
    assert find_position_rule(model, "esm.encoder.layer.0") == PositionRule()


def test_a_look_at_whole_sequences_is_at_whole_ones() -> None:
    """ESM's token dropout scales a sequence by its share of masked tokens."""
    job = masked_job("esm", pad_token_id=1, mask_token_id=3, token_dropout=True)
    facts = discover(build_model(job), job)
    assert facts.supports(Axis.CONTEXT).ok and facts.split_forward is not None


def test_positions_behind_the_padding() -> None:
    ids = torch.tensor([[5, 1, 6, 7]])
    assert PositionRule(1).positions(ids).tolist() == [[2, 1, 3, 4]]
    assert PositionRule().positions(ids).tolist() == [[0, 1, 2, 3]]
