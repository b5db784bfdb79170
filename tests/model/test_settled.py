"""What a family's forward would do to modules, weights and buffers is done ahead, or kept as transformers has it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.coverage import AGREES, LAYOUTS, judge_toys, outcome_of, write_corpora
from shardwise.errors import LegalityError
from shardwise.job.axes import Axis
from shardwise.job.schema import Job
from shardwise.model.build import build_model
from shardwise.model.discover import discover
from shardwise.model.facts import ModelFacts
from shardwise.parallel.stage_boundary import BoundaryShapes
from shardwise.parallel.transforms.dtypes import convert
from shardwise.plan.plan import Plan, World, resolve
from shardwise.testing.toy_configs import toy_config
from shardwise.testing.world import WorldPool


def toy_job(model_type: str, task: str = "causal_lm", precision: str = "fp32", **config: Any) -> Job:
    model = {"config": toy_config(model_type, **config), "task": task}
    sections = {"data": {"sequence_length": 32}, "precision": {"compute": precision}}
    return Job.model_validate({"model": model, **sections})


def resolved(job: Job, facts: ModelFacts) -> Plan:
    return resolve(job, World(1, "cpu", 1), facts)


def test_an_evaluation_leaves_the_weights_of_rwkv_as_they_are() -> None:
    model: Any = build_model(toy_job("rwkv", rescale_every=1)).to_empty(device="cpu")
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        evaluated = model.eval()(torch.arange(4)[None]).logits
        trained = model.train()(torch.arange(4)[None]).logits
    torch.testing.assert_close(evaluated, trained)
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())


@pytest.mark.parametrize(("block_size", "kind"), [(4, "BigBirdSelfAttention"), (1, "BigBirdBlockSparseAttention")])
def test_big_bird_has_the_attention_of_its_sequences(block_size: int, kind: str) -> None:
    """A sequence of 11 blocks or fewer is attended to as a whole."""
    model: Any = build_model(toy_job("big_bird", "masked_lm", block_size=block_size))
    assert {type(layer.attention.self).__name__ for layer in model.bert.encoder.layer} == {kind}


def test_a_buffer_that_an_initializer_fills_keeps_its_16_bits() -> None:
    """RecurrentGemma multiplies by the root of its hidden size, rounded to bf16."""
    job = toy_job("recurrent_gemma")
    model: Any = build_model(job)
    convert(model, resolved(job, discover(model, job)))
    assert model.model.normalizer.dtype == torch.bfloat16
    assert model.model.embed_tokens.weight.dtype == torch.float32


def test_a_bias_of_whole_heads_is_whole_on_a_tensor_rank() -> None:
    for heads_whole, heads in (("", 2), ("no plan", 4)):
        facts: Any = SimpleNamespace(heads_whole=heads_whole, attention_heads=4, family="mt5")
        shapes = BoundaryShapes.__new__(BoundaryShapes)
        shapes.facts, shapes.plan = facts, SimpleNamespace(degrees={"tensor": 2})  # type: ignore[assignment]
        assert shapes._on_tensor_rank((1, 4, 9, 9)) == (1, heads, 9, 9)


def test_fp64_is_refused_where_transformers_own_code_fails_in_it() -> None:
    job = toy_job("xglm", precision="fp64")
    facts = discover(build_model(job), job)
    with pytest.raises(LegalityError, match="puts the least number of the dtype into fp32"):
        resolved(job, facts)
    assert resolved(job, replace(facts, unfit_dtypes={})).dtypes.compute == "fp64"


@pytest.mark.parametrize("model_type", ["doge", "gemma4_unified"])
def test_masks_of_whole_sequences_are_made_of_whole_ones(model_type: str) -> None:
    facts = facts_of(model_type, "causal_lm")
    assert facts.supports(Axis.CONTEXT).ok and facts.split_forward is not None


def test_masks_that_a_model_makes_itself_refuse_split_inputs() -> None:
    """LayoutLM's are of the tokens that it is given."""
    assert not facts_of("layoutlm", "masked_lm").supports(Axis.CONTEXT).ok


def test_windows_that_are_filled_up_make_hidden_states_longer() -> None:
    """Longformer's forward asks its mask, which it has made itself, whether it has global tokens."""
    stages = facts_of("longformer", "masked_lm").stages
    assert stages.reshapes and stages.has_flat_boundaries and not facts_of("big_bird", "masked_lm").stages.reshapes


def facts_of(model_type: str, task: str, **config: Any) -> ModelFacts:
    job = toy_job(model_type, task, **config)
    return discover(build_model(job), job)


def test_what_is_dropped_of_without_rows_asks_for_a_microbatch() -> None:
    """Funnel drops of a table of angles; BERT's tensors begin with rows. FSMT reads values, and may do anything."""
    for model_type, expected in (("funnel", True), ("bert", False)):
        assert facts_of(model_type, "masked_lm").drops_by_microbatch == expected
    assert facts_of("fsmt", "seq2seq_lm").drops_by_microbatch
    assert not facts_of("fsmt", "seq2seq_lm", dropout=0.0, attention_dropout=0.0).drops_by_microbatch


def test_blocks_that_are_not_called_are_no_units() -> None:
    """SqueezeBERT runs `layer.forward(...)`, past the hooks in which FSDP2 gathers."""
    assert facts_of("squeezebert", "masked_lm").blocks == ()


def test_a_tower_for_pictures_is_in_nobodys_way_where_there_is_text_alone() -> None:
    facts = facts_of("gemma3", "causal_lm")
    assert facts.supports(Axis.PIPELINE).ok and facts.supports(Axis.CONTEXT).ok
    assert all(block.name.startswith("model.language_model.layers.") for block in facts.blocks)


def test_logits_of_a_fixed_number_ask_for_as_many_tokens() -> None:
    assert facts_of("perceiver", "masked_lm").fixed_logits == 16
    assert facts_of("bert", "masked_lm").fixed_logits == 0


def test_a_soft_cap_keeps_logits_once_more() -> None:
    assert facts_of("gemma2", "causal_lm").kept_logits == 1
    assert facts_of("granite", "causal_lm").kept_logits == facts_of("llama", "causal_lm").kept_logits == 0


def test_a_table_of_another_name_stands_where_it_is_used() -> None:
    """T5's shared embeddings are called by the name of the encoder's, and a head of classes does not use them."""
    stages = facts_of("t5", "token_classification").stages
    assert stages.runs["transformer.shared"] == stages.runs["transformer.encoder.embed_tokens"] == (0,)
    assert not any("shared" in name for name in stages.after)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "model_type"),
    [
        ("causal_lm", "ctrl"),
        ("causal_lm", "recurrent_gemma"),
        ("causal_lm", "rwkv"),
        ("masked_lm", "big_bird"),
        ("masked_lm", "longformer"),
        ("seq2seq_lm", "encoder-decoder"),
        ("seq2seq_lm", "led"),
        ("seq2seq_lm", "mt5"),
        ("seq2seq_lm", "nllb-moe"),
        ("seq2seq_lm", "t5gemma"),
        ("token_classification", "t5"),
    ],
)
def test_agrees_on_stages_of_tensor_ranks(world_pool: WorldPool, tmp_path: Path, task: str, model_type: str) -> None:
    layout = "tensor 2 x pipeline 2"
    write_corpora(tmp_path)
    judged = judge_toys(tmp_path, task, model_type, [layout])
    assert isinstance(judged, dict)
    assert outcome_of(world_pool, judged[layout], LAYOUTS[layout][0]) == (AGREES, "")
