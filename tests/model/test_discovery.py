"""Structure alone gives blocks, ties, embeddings and sizes, for Hugging Face models and for a user's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING

from shardwise.job.axes import Axis
from shardwise.job.capability import SUPPORTED
from shardwise.job.schema import Job
from shardwise.model.build import build_model
from shardwise.model.discover import discover, find_block_lists, find_ties
from shardwise.model.facts import ModelFacts
from shardwise.planner.formulas.prediction import ModelShape
from shardwise.testing.toy_configs import toy_config
from tests.model import toys

BLOCKS = {
    "gpt2": "transformer.h",
    "gpt_neox": "gpt_neox.layers",
    "gptj": "transformer.h",
    "gpt_neo": "transformer.h",
    "bert": "bert.encoder.layer",
    "roberta": "roberta.encoder.layer",
    "bloom": "transformer.h",
    "opt": "model.decoder.layers",
    "falcon": "transformer.h",
}
TIED = {"gpt2", "gpt_neo", "bert", "roberta", "bloom", "opt", "gemma", "gemma2", "falcon"}
KEY_VALUE_HEADS = {"llama": 2, "mistral": 2, "qwen3": 2, "gemma": 2, "gemma2": 2, "falcon": 1}
WIDER = {"gpt2", "gptj", "gpt_neo", "bloom", "falcon"}  # four times the width, for want of a setting
POSITIONS = {"bloom": None, "roberta": 62}
POSITION_TABLES = {"gpt2": 64, "gpt_neo": 64, "bert": 66, "roberta": 66, "opt": 66}  # rows, token types included


def _facts(model_type: str, **keywords: Any) -> ModelFacts:
    job = toys.job(model_type, **keywords)
    return discover(build_model(job), job)


def _user_facts(name: str, example: dict[str, torch.Tensor] | None = None, **arguments: Any) -> ModelFacts:
    job = toys.factory_job(name, factory_arguments=arguments)
    return discover(build_model(job), job, example)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("model_type", toys.CONFIGS)
def test_facts_of_every_family(model_type: str) -> None:
    job = toys.job(model_type)
    model = build_model(job)
    facts = discover(model, job)
    prefix = BLOCKS.get(model_type, "model.layers")
    words = 97 * 32
    assert [block.name for block in facts.blocks] == [f"{prefix}.0", f"{prefix}.1"]
    assert facts.blocks[0].parameters == sum(p.numel() for p in model.get_submodule(f"{prefix}.0").parameters())
    assert facts.family == model_type and facts.returns_logits and facts.has_config and facts.probe_failure == ""
    assert (facts.hidden_size, facts.layers, facts.attention_heads) == (32, 2, 4)
    assert facts.key_value_heads == KEY_VALUE_HEADS.get(model_type, 4)
    assert facts.intermediate_size == (128 if model_type in WIDER else 48)
    assert facts.vocabulary_size == 97
    assert facts.max_positions == POSITIONS.get(model_type, 64)
    assert facts.parameters == sum(p.numel() for p in model.parameters())
    assert bool(facts.ties) == (model_type in TIED)
    looked_up = POSITION_TABLES.get(model_type, 0) * 32 + (0 if model_type in TIED else words)
    assert facts.embedding_parameters == looked_up
    assert list(facts.parameter_shapes) == [name for name, _ in model.named_parameters()]
    assert facts.buffers == tuple(name for name, _ in model.named_buffers())


def test_a_single_layer_is_a_block() -> None:
    facts = _facts("gpt_neox", config={"num_hidden_layers": 1})
    assert [block.name for block in facts.blocks] == ["gpt_neox.layers.0"]
    assert facts.layers == 1 and facts.blocks_share_arguments


def test_flops_convention() -> None:
    facts = _facts("gpt_neox")
    in_products = facts.parameters - 97 * 32
    assert facts.model_flops_per_token(16) == 6 * in_products + 12 * 2 * 16 * 32


def test_layers_that_share_weights_are_counted_as_often_as_they_run() -> None:
    config = {"model_type": "albert", **toys.WIDE, "embedding_size": 16}
    job = Job.model_validate({"model": {"config": {**config, "num_hidden_layers": 5}, "task": "masked_lm"}})
    facts = discover(build_model(job), job)
    assert len(facts.blocks) == 1 and facts.layers == 5 and not facts.blocks_share_arguments


def test_the_width_is_that_of_what_blocks_hand_on() -> None:
    assert _user_facts("without_norms").hidden_size == 16


def test_a_users_tokens_model() -> None:
    facts = _user_facts("tokens")
    assert [block.name for block in facts.blocks] == ["blocks.0", "blocks.1"]
    assert facts.embedding_parameters == 20 * 16  # the words are read by a matrix product, though no module is tied
    assert (facts.hidden_size, facts.vocabulary_size, facts.intermediate_size) == (16, 50, 48)
    assert (facts.layers, facts.attention_heads, facts.max_positions) == (2, 0, None)
    assert facts.family == "Tokens" and facts.computes_own_loss and not facts.takes_token_ids


def test_a_users_module_needs_an_example_for_the_probe() -> None:
    unseen = _user_facts("tower")
    seen = _user_facts("tower", {"x": torch.empty(2, 5, 8)})
    assert "no example batch" in unseen.probe_failure and not unseen.blocks_share_arguments
    assert seen.probe_failure == "" and seen.blocks_share_arguments and not seen.has_functional_dropout
    assert unseen.blocks == seen.blocks and len(seen.blocks) == 3
    assert seen.ties == (("mirror", "readout.weight"),)
    assert seen.buffers == ("scales",)
    assert unseen.has_functional_dropout and unseen.has_attention_dropout


class _Chain(nn.Module):
    """Blocks between two layers, of which the last may be needed for what follows it."""

    def __init__(self, narrow: bool = False, reaches: bool = False, counts: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        self.blocks = nn.ModuleList(toys.Block(8) for _ in range(3))
        self.narrow, self.reaches = narrow, reaches
        if counts:
            self.blocks[1].register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.reaches:
            x = x * self.blocks[1].up.weight.shape[0]
        for block in self.blocks:
            x = block(x)
        x = self.last(x)
        return x.view(len(x), 3, 2) if self.narrow else x


def _chain(**arguments: bool) -> ModelFacts:
    with torch.device("meta"):
        model = _Chain(**arguments)
    return discover(model, toys.factory_job("tower"), {"x": torch.empty(2, 3, 4)})


def test_a_users_chain_can_be_cut() -> None:
    facts = _chain()
    stages = facts.stages
    assert facts.supports(Axis.PIPELINE) == SUPPORTED and stages.hidden == (3, 8)
    assert set(stages.before) == {"first"} and set(stages.after) == {"last"}
    assert _chain(narrow=True).supports(Axis.PIPELINE).ok  # what stands behind the blocks runs on the last stage alone


def test_a_shortcut_past_the_blocks_of_a_transformers_model_is_named() -> None:
    """Such as the code of a model on the Hub may have."""
    job = Job.model_validate({"model": {"config": {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 2}}})
    model: Any = build_model(job)
    assert discover(model, job).supports(Axis.PIPELINE).ok
    kept: list[torch.Tensor] = []
    model.transformer.wte.register_forward_hook(lambda module, args, output: kept.append(output))
    model.transformer.ln_f.register_forward_pre_hook(lambda module, args: (args[0] + kept[-1].detach(),))
    assert (
        "transformer.wte returns is used behind the last block" in discover(model, job).supports(Axis.PIPELINE).reason
    )


def test_a_users_chain_that_cannot_be_cut_says_why() -> None:
    assert "blocks.1 holds buffers" in _chain(counts=True).supports(Axis.PIPELINE).reason
    assert "reaches into its blocks: it raises AttributeError" in _chain(reaches=True).supports(Axis.PIPELINE).reason


class _Model(nn.Module):
    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)


def _list(count: int, width: int = 8) -> nn.ModuleList:
    return nn.ModuleList(toys.Block(width) for _ in range(count))


def test_block_lists_in_module_order() -> None:
    both = _Model(encoder=_Model(layers=_list(2)), decoder=_Model(layers=_list(3)), side=_list(2, width=1))
    assert find_block_lists(both) == [
        ["encoder.layers.0", "encoder.layers.1"],
        ["decoder.layers.0", "decoder.layers.1", "decoder.layers.2"],
    ]


def test_bare_layers_are_not_blocks_beside_real_ones() -> None:
    heads = nn.ModuleList(nn.Linear(8, 500) for _ in range(4))
    assert find_block_lists(_Model(heads=heads, layers=_list(2))) == [["layers.0", "layers.1"]]
    assert find_block_lists(_Model(heads=heads)) == [[f"heads.{i}" for i in range(4)]]


def test_lists_inside_blocks_are_not_blocks() -> None:
    outer = nn.ModuleList(_Model(experts=_list(4), mix=nn.Linear(8, 8)) for _ in range(3))
    assert find_block_lists(_Model(layers=outer)) == [["layers.0", "layers.1", "layers.2"]]


def test_a_wrapper_of_one_gives_way() -> None:
    assert find_block_lists(nn.Sequential(_Model(layers=_list(3)))) == [["0.layers.0", "0.layers.1", "0.layers.2"]]


def test_run_of_blocks_in_a_sequence_of_other_things() -> None:
    model = nn.Sequential(nn.Embedding(9, 8), toys.Block(8), toys.Block(8), nn.LayerNorm(8), nn.Linear(8, 9))
    assert find_block_lists(model) == [["1", "2"]]


def test_hybrid_layers_are_blocks() -> None:
    layers = nn.ModuleList([toys.Block(8), _Model(a=nn.Linear(8, 8)), toys.Block(8), _Model(a=nn.Linear(8, 8))])
    assert find_block_lists(_Model(layers=layers)) == [[f"layers.{i}" for i in range(4)]]


def test_no_blocks() -> None:
    assert find_block_lists(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))) == []


def test_ties_of_three_names() -> None:
    model = _Model(a=nn.Linear(4, 4), b=nn.Linear(4, 4), c=nn.Linear(4, 4))
    model.b.weight = model.a.weight
    model.c.weight = model.a.weight
    assert find_ties(model) == (("a.weight", "b.weight", "c.weight"),)


MIXTRAL = {
    "model_type": "mixtral", "vocab_size": 50, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "intermediate_size": 16, "num_local_experts": 5, "num_experts_per_tok": 2,
}  # fmt: skip


@pytest.mark.parametrize("chosen", [None, "grouped_mm"])
def test_experts_run_one_after_the_other_in_fp64_unless_the_config_chooses(chosen: str | None) -> None:
    config = MIXTRAL if chosen is None else {**MIXTRAL, "experts_implementation": chosen}
    job = Job.model_validate({"model": {"config": config}, "precision": {"compute": "fp64"}})
    facts = discover(build_model(job), job)
    assert facts.experts_looped == (chosen is None) and facts.experts_grouped == (chosen is not None)


def test_experts_are_grouped_in_fp32() -> None:
    job = Job.model_validate({"model": {"config": MIXTRAL}})
    facts = discover(build_model(job), job)
    assert facts.experts_grouped and not facts.experts_looped


def test_flops_count_the_experts_that_a_token_goes_to() -> None:
    job = Job.model_validate({"model": {"config": MIXTRAL}, "data": {"sequence_length": 16}})
    facts = discover(build_model(job), job)
    expert = 3 * 32 * 16
    assert facts.idle_parameters == 2 * 3 * expert and facts.experts_of_token == 2 and not facts.experts_copied
    one_block = 32 * 32 * 2 + 32 * 16 * 2 + 5 * 32 + 2 * expert + 2 * 32  # attention, router, experts, norms
    in_products = 2 * one_block + 32 + 50 * 32
    assert facts.model_flops_per_token(16) == 6 * in_products + 12 * 2 * 16 * 32
    shape = ModelShape.of(facts)
    assert shape.flops_per_token(16)["palm"] == facts.model_flops_per_token(16)
    assert shape.intermediate == pytest.approx(2 * 16, abs=2) and shape.idle == 3 * expert  # the router is in it too


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_heads_may_have_a_size_of_their_own(attention: str) -> None:
    """PaLM's count of FLOPs and a block's parameters go by heads times their size, here twice the hidden size."""
    config = {
        "model_type": "qwen3", "vocab_size": 50, "hidden_size": 32, "num_attention_heads": 4, "head_dim": 16,
        "num_key_value_heads": 2, "num_hidden_layers": 2, "intermediate_size": 48, "attn_implementation": attention,
    }  # fmt: skip
    job = Job.model_validate({"model": {"config": config}, "data": {"sequence_length": 16}})
    facts = discover(build_model(job), job)
    assert (facts.head_size, facts.attention_width, facts.key_value_width) == (16, 64, 32)
    in_products = 2 * (32 * (64 + 32 + 32 + 64) + 3 * 32 * 48 + 2 * 32 + 2 * 16) + 32 + 50 * 32
    assert facts.model_flops_per_token(16) == 6 * in_products + 12 * 2 * 16 * 64
    shape = ModelShape.of(facts)
    assert shape.flops_per_token(16)["palm"] == facts.model_flops_per_token(16)
    assert shape.attention_width == 64 and shape.key_value_width == 32


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model_type", ["deepseek_v4", "qwen4_exp_text"])
def test_what_has_several_streams(model_type: str) -> None:
    """Their blocks hand on [B, S, streams, H] and [B, S, streams * H]."""
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {model_type}")
    job = Job.model_validate({"model": {"config": toy_config(model_type), "attention": "eager"}})
    facts = discover(build_model(job), job)
    assert facts.supports(Axis.PIPELINE) == SUPPORTED and facts.stages.has_flat_boundaries
