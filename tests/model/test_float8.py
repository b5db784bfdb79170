"""Which linear layers are in float8: ends and small layers are left, by their part on a tensor rank."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.job.schema import Job
from shardwise.model.build import build_model
from shardwise.model.discover import discover
from shardwise.model.facts import ModelFacts
from shardwise.model.float8 import ENDS, float8_summary, left_out, local_sizes
from shardwise.plan.draft import World
from shardwise.plan.plan import resolve

LLAMA = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32,
         "num_key_value_heads": 8, "num_hidden_layers": 4, "vocab_size": 96}  # fmt: skip


@pytest.fixture(scope="module")
def llama() -> ModelFacts:
    job = Job.model_validate({"model": {"config": LLAMA}})
    return discover(build_model(job), job)


def test_blocks_alone_are_looked_at_and_both_ends_are_left(llama: ModelFacts) -> None:
    left = left_out(llama, "tensorwise")
    assert len(left) == 4 * 7 and not any("lm_head" in name for name in left)
    ends = [name for name, reason in left.items() if reason == ENDS]
    assert len(ends) == 2 * 7 and all(name.startswith(("model.layers.0.", "model.layers.3.")) for name in ends)
    assert set(left_out(llama, "").values()) == {""}


@pytest.mark.parametrize("scaling, small", [("tensorwise", {"k_proj", "v_proj"}), ("rowwise", {"k_proj", "v_proj"})])
def test_small_layers_are_left(llama: ModelFacts, scaling: str, small: set[str]) -> None:
    left = left_out(llama, scaling)
    found = {name.rpartition(".")[2] for name, reason in left.items() if "too small" in reason}
    assert found == small
    text = float8_summary(left)
    assert (
        text.startswith("10 of 28 linear layers") and f"4 left: 4096 x 1024 is too small to gain from {scaling}" in text
    )


def test_a_tensor_rank_is_judged_by_its_part(llama: ModelFacts) -> None:
    name = "model.layers.1.self_attn.{}_proj".format
    assert local_sizes(llama, name("q"), 4) == (4096, 1024)
    assert local_sizes(llama, name("o"), 4) == (1024, 4096)
    assert local_sizes(llama, name("k"), 16) == (4096, 128)  # a head of 128, which two ranks hold
    left = left_out(llama, "tensorwise", 4)
    assert "4096 x 1024 is too small" in left[name("q")] and not left["model.layers.1.mlp.down_proj"]


def test_what_is_no_multiple_of_16_cannot_be_done(llama: ModelFacts) -> None:
    odd = replace(llama, linears={"model.layers.1.up": (4096, 4100)})
    assert left_out(odd, "") == {"model.layers.1.up": "4096 x 4100 is no multiple of 16"}


def test_the_plan_prints_the_reason(llama: ModelFacts) -> None:
    job = Job.model_validate({"model": {"config": LLAMA}, "precision": {"fp8": "emulate"}})
    plan = resolve(job, World(1, "cpu", 1), llama)
    assert len(plan.float8) == 10 and plan.rules["float8"] == float8_summary(left_out(llama, "tensorwise"))
    assert any("none of its speed" in note for note in plan.notes)


def test_conv1d_of_gpt2_is_a_linear_layer() -> None:
    job = Job.model_validate({"model": {"config": {"model_type": "gpt2", "n_embd": 32, "n_head": 2, "n_layer": 1}}})
    facts = discover(build_model(job), job)
    assert facts.linears["transformer.h.0.attn.c_attn"] == (32, 96)
    assert facts.linears["transformer.h.0.mlp.c_proj"] == (128, 32)
