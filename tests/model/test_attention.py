"""Which models' sequences can be split over ranks, and why others' cannot."""

from __future__ import annotations

import pytest

from shardwise.job.axes import Axis
from shardwise.job.capability import SUPPORTED
from shardwise.job.schema import Job
from shardwise.model.build import build_model
from shardwise.model.discover import discover
from shardwise.model.facts import ModelFacts
from shardwise.model.registry import known_families
from tests.model.toys import CONFIGS, factory_job, job

SPLITS = (
    "gptj",
    "gpt_neo",
    "falcon",
    "gpt2",
    "gpt_neox",
    "bert",
    "roberta",
    "opt",
    "llama",
    "mistral",
    "qwen3",
    "gemma",
    "gemma2",
)


def facts_of(family: str, **config: object) -> ModelFacts:
    wanted = job(family, config=dict(config))
    return discover(build_model(wanted), wanted)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", SPLITS)
def test_attention_through_the_interface(family: str) -> None:
    assert facts_of(family).supports(Axis.CONTEXT) == SUPPORTED


def test_attention_of_its_own() -> None:
    config = {"model_type": "mpt", "d_model": 32, "n_layers": 1, "n_heads": 4}
    wanted = Job.model_validate({"model": {"config": config}})
    facts = discover(build_model(wanted), wanted)
    assert facts.supports(Axis.CONTEXT).ok and facts.split_forward is not None
    assert [module.name for module in facts.split_forward.gathered] == ["transformer.blocks.0.attn"]
    assert facts.attention_kernels.reason == "mpt is not among the families whose attention kernels compute"


def test_biases_that_count_positions_are_made_of_whole_sequences() -> None:
    assert facts_of("falcon").split_forward is None
    assert facts_of("falcon", alibi=True).split_forward is not None


WITH_KERNELS = {name: family.attention for name, family in known_families().items() if family.attention is not None}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", [name for name in WITH_KERNELS if name in CONFIGS])
def test_the_record_of_a_family_says_what_it_asks_for(family: str) -> None:
    asked = {"falcon": {"alibi": True}}.get(family, {})
    layers, row = facts_of(family, **asked).attention, WITH_KERNELS[family]
    assert layers and {layer.bias for layer in layers} == {row.bias}
    assert {layer.softcap for layer in layers} == {row.softcap}
    assert row.window or not any(layer.window for layer in layers)


def test_what_each_layer_asks_of_its_kernel() -> None:
    neo = facts_of("gpt_neo", window_size=5).attention
    assert [layer.window for layer in neo] == [None, 5] and neo[1].name == "transformer.h.1.attn.attention"
    assert [layer.bias for layer in facts_of("bloom").attention] == ["keys", "keys"]
    assert {layer.softcap for layer in facts_of("gemma2").attention} == {True}
    assert {layer.head_size for layer in facts_of("llama").attention} == {8}


def test_biases_that_can_be_asked_for_other_keys() -> None:
    facts = facts_of("bloom")
    assert facts.supports(Axis.CONTEXT).ok
    assert facts.attention_arguments == ("key_bias",) and facts.own_attention_arguments == ()


def test_rotary_angles_by_length() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    facts = facts_of("llama", rope_parameters=rope)
    assert facts.supports(Axis.CONTEXT).ok and facts.split_forward is not None  # the model sees whole sequences


def test_a_module_of_the_users_own() -> None:
    wanted = factory_job("tokens")
    assert "model.factory" in discover(build_model(wanted), wanted).supports(Axis.CONTEXT).reason


def test_what_attention_is_given_besides() -> None:
    assert facts_of("gemma2").attention_arguments == ("softcap",)
    assert facts_of("mistral", sliding_window=4).attention_arguments == ()
