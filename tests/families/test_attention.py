"""Which models' sequences can be split over ranks, and why others' cannot."""

from __future__ import annotations

import pytest

from shardwise.families.build import build_model
from shardwise.families.discovery import discover
from shardwise.families.facts import ModelFacts
from tests.families.toys import factory_job, job

SPLITS = ("gpt2", "gpt_neox", "bert", "roberta", "opt", "llama", "mistral", "qwen3", "gemma", "gemma2")


def facts_of(family: str, **config: object) -> ModelFacts:
    wanted = job(family, config=dict(config))
    return discover(build_model(wanted), wanted)


@pytest.mark.parametrize("family", SPLITS)
def test_attention_through_the_interface(family: str) -> None:
    assert facts_of(family).context_refusal == ""


@pytest.mark.parametrize("family", ["gptj", "gpt_neo", "falcon"])
def test_attention_of_its_own(family: str) -> None:
    assert "does not go through transformers' AttentionInterface" in facts_of(family).context_refusal


def test_positions_that_cannot_be_given() -> None:
    assert "takes no position_ids" in facts_of("bloom").context_refusal


def test_rotary_angles_by_length() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    assert "depends on the longest position" in facts_of("llama", rope_parameters=rope).context_refusal


def test_a_module_of_the_users_own() -> None:
    wanted = factory_job("tokens")
    assert "model.factory" in discover(build_model(wanted), wanted).context_refusal


def test_what_attention_is_given_besides() -> None:
    assert facts_of("gemma2").attention_arguments == ("softcap",)
    assert facts_of("mistral", sliding_window=4).attention_arguments == ()
