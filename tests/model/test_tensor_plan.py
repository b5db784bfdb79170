"""What tensor parallelism may split, and the reason where it may not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from shardwise.errors import LegalityError
from shardwise.job.axes import Axis
from shardwise.job.capability import SUPPORTED
from shardwise.job.schema import Job
from shardwise.model import registry
from shardwise.model import tensor_plan as plans
from shardwise.model.build import build_model
from shardwise.model.discover import discover, find_block_lists
from shardwise.model.facts import ModelFacts
from shardwise.model.family import Family
from shardwise.model.probe import probe_forward
from shardwise.model.registry import known_families
from shardwise.model.split_rules import COLUMN, ROW
from shardwise.model.tensor_split import TensorSplit
from shardwise.plan.plan import World, resolve
from shardwise.testing.toy_configs import toy_config
from tests.parity.jobs import TENSOR_CONFIGS

OWN_SPLITS = {
    name: family.tensor_splits for name, family in known_families().items() if family.tensor_splits is not None
}
SMALL: dict[str, Any] = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 11}


def model(family: str, **settings: Any) -> nn.Module:
    with torch.device("meta"):
        made: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SMALL, **settings))
    return made


def _refusal(made: nn.Module) -> str:
    splits, capability = plans.tensor_plan(made)
    assert not splits and not capability.ok
    return capability.reason


def _give_record(monkeypatch: pytest.MonkeyPatch, family: Family) -> None:
    """Let the registry know `family` in the place of the one that has its model types."""
    records = {**known_families(), **dict.fromkeys(family.model_types, family)}
    monkeypatch.setattr(registry, "known_families", lambda: records)


def published_plan(family: str) -> dict[str, str]:
    """Transformers' own, without the input embeddings that later versions name: these are split as the vocabulary."""
    plan = getattr(CONFIG_MAPPING[family], "base_model_tp_plan", None) or {}
    return {rule: kind for rule, kind in plan.items() if kind != "embedding_rowwise"}


def test_a_region_with_parameters_that_the_plan_does_not_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """OPT's MLP lies in the block itself, beside its norms: entered there, residuals would be summed in backward."""
    opt = model("opt", ffn_dim=12, word_embed_proj_dim=8)
    splits, capability = plans.tensor_plan(opt)
    assert splits["model.decoder.layers.0.fc1"].alone and capability == SUPPORTED
    careless = {name: COLUMN if split.alone else split for name, split in OWN_SPLITS["opt"].items()}
    _give_record(monkeypatch, replace(known_families()["opt"], tensor_splits=careless))
    splits, capability = plans.tensor_plan(opt)
    assert not splits and "layer_norm" in capability.reason


def test_models_without_a_plan_and_modules_of_ones_own_are_refused() -> None:
    assert _refusal(model("mpt")) == "there is no plan for mpt"
    assert _refusal(model("codegen"))  # transformers 5.17 has no plan, 5.24 has one for some degrees
    assert "slow_but_exact" in _refusal(model("bloom", slow_but_exact=True, pretraining_tp=2))
    assert _refusal(nn.Linear(2, 2)).startswith("a module of model.factory")
    planned = model("mpt")
    planned.config.base_model_tp_plan = {"blocks.*.ffn.down_proj": "packed_rowwise"}
    assert _refusal(planned) == "there is no plan for mpt"


@pytest.mark.parametrize("family", OWN_SPLITS)
def test_our_tables_agree_with_those_of_transformers_where_there_are_both(family: str) -> None:
    """Up to transformers 5.17 there are none; a later version may bring some."""
    published = published_plan(family)
    ours = {name: split.kind for name, split in OWN_SPLITS[family].items() if split.kind != "inner"}
    if "experts" in " ".join(
        OWN_SPLITS[family]
    ):  # transformers' leaves shared experts whole, and up to 5.17 all experts
        published = {name: kind for name, kind in published.items() if not name.startswith("layers.*.mlp.experts")}
        ours = {name: kind for name, kind in ours.items() if "expert" not in name}
    assert not published or {name: plans.PUBLISHED[kind].kind for name, kind in published.items()} == ours


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gemma", "gpt_neox"])
def test_published_plans_are_followed(family: str) -> None:
    made = model(family, intermediate_size=12)
    splits, capability = plans.tensor_plan(made)
    published = published_plan(family)
    assert capability.ok and len(splits) == len(published)  # of one block
    for name, split in splits.items():
        rule = name.removeprefix(f"{made.base_model_prefix}.").replace(".0.", ".*.")
        assert plans.PUBLISHED[published[rule]].kind == split.kind


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gemma", "gpt_neox"])
def test_stages_and_units_are_those_of_published_plans(family: str) -> None:
    """In the order of `base_model_pp_plan`; what `_fsdp_plan` keeps gathered is ours that stays with the root."""
    job = Job.model_validate({"model": {"config": {"model_type": family, **TENSOR_CONFIGS[family]}}})
    made: Any = build_model(job)
    facts = discover(made, job)
    blocks = {block.name.rpartition(".")[0] for block in facts.blocks}
    base = [f"{made.base_model_prefix}.{name}" for name in CONFIG_MAPPING[family].base_model_pp_plan]
    assert [*facts.stages.before, *blocks, *facts.stages.after] == [*base, *type(made)._pp_plan]
    units = {name.removesuffix(".*"): kind for name, kind in made._fsdp_plan.items() if not _missing(made, name)}
    kept = {name for name, kind in units.items() if kind == "keep_full_weight"}
    assert kept <= set(facts.stages.after)
    assert {name for name in units.keys() - kept if f"{name}.*" in made._fsdp_plan} == blocks


EXPERTS: dict[str, Any] = {"num_key_value_heads": 2, "intermediate_size": 12, "num_local_experts": 3}


def test_experts_are_a_region_and_their_router_is_outside_of_it() -> None:
    splits, capability = plans.tensor_plan(model("mixtral", **EXPERTS))
    experts = splits["model.layers.0.mlp.experts"]
    assert capability.ok and experts.kind == "experts" and experts.grouped
    assert not plans.tensor_plan(model("mixtral", **EXPERTS, experts_implementation="batched_mm"))[0][
        "model.layers.0.mlp.experts"
    ].grouped
    fused, down = experts.of("gate_up_proj"), experts.of("down_proj")
    assert fused is not None and (fused.dim, fused.along(24, 2)) == (1, ((12, 12), 1))
    assert down is not None and (down.dim, down.along(12, 2)) == (2, ((12,), 1))
    assert not any("gate" in name for name in splits) and experts.of("bias") is None


def test_experts_of_another_kind_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    mixtral: Any = model("mixtral", **EXPERTS)
    splits, _ = plans.tensor_plan(mixtral)
    heads = {name: split for name, split in splits.items() if split.kind != "experts"}
    experts = mixtral.model.layers[0].mlp.experts
    experts.bias = nn.Parameter(torch.empty(3, device="meta"))
    assert plans.tensor_plan(mixtral) == (heads, SUPPORTED) != (splits, SUPPORTED)
    del experts.bias
    assert plans.tensor_plan(mixtral) == (splits, SUPPORTED)
    monkeypatch.setattr(type(experts), "forward", _in_turns)
    assert plans.tensor_plan(mixtral) == (heads, SUPPORTED)


def _in_turns(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Experts with gate and up in turns, all of them for each token."""
    both = torch.einsum("th,efh->etf", hidden_states, self.gate_up_proj)
    inner = both[..., ::2].sigmoid() * both[..., 1::2]
    return torch.einsum("etf,ehf->th", inner, self.down_proj)


def test_where_there_is_no_plan_layers_are_split_by_outputs() -> None:
    """Linear layers that run, whose weights nothing else reads, and that are no routers: OLMoE's plan has no others."""
    small = {**SMALL, "hidden_size": 32, "intermediate_size": 24, "num_experts": 20, "num_experts_per_tok": 2}
    job = Job.model_validate({"model": {"config": {"model_type": "olmoe", **small}}})
    facts = discover(build_model(job), job)
    assert facts.heads_whole == "the plan for olmoe leaves its attention whole" and facts.supports(Axis.TENSOR).ok
    kinds = {name.removeprefix("model.layers.0."): split.kind for name, split in facts.tensor_splits.items()}
    names = [f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")]
    assert kinds == {**dict.fromkeys(names, "gathered"), "mlp.experts": "experts"}
    assert facts.fewest_gathered == 32 and "gathered" in facts.sequence_parallel.reason
    with pytest.raises(LegalityError, match="use at most 32"):
        resolve(
            Job.model_validate({**job.model_dump(), "parallel": {"tensor_parallel_degree": 64}}),
            World(64, "cpu", 64),
            facts,
        )


def _kinds_of(model_type: str, block: int) -> tuple[ModelFacts, dict[str, str]]:
    """Return the facts of a toy, and the kinds of splits in one of its blocks, by the module's name there."""
    job = Job.model_validate({"model": {"config": toy_config(model_type, experts_implementation="eager")}})
    facts = discover(build_model(job), job)
    start = f"{facts.blocks[block].name}."
    splits = facts.tensor_splits.items()
    return facts, {name.removeprefix(start): split.kind for name, split in splits if name.startswith(start)}


def test_latent_attention_is_split_by_heads_whatever_the_plan_says() -> None:
    """Transformers' plan for DeepSeek-V3 leaves it whole; an indexer (V3.2) is whole on each rank."""
    facts, kinds = _kinds_of("deepseek_v3", 0)
    attention = {name: kind for name, kind in kinds.items() if name.startswith("self_attn")}
    whole = ("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm")
    of_heads = {"q_b_proj": "column", "kv_b_proj": "column", "o_proj": "row"}
    expected = dict.fromkeys(whole, "partial") | of_heads
    assert attention == {f"self_attn.{name}": kind for name, kind in expected.items()}
    assert not facts.heads_whole
    facts, kinds = _kinds_of("deepseek_v32", 0)
    assert kinds["self_attn.indexer.wk"] == "partial" and not facts.heads_whole


def test_latent_attention_beside_anything_else_stays_whole() -> None:
    job = Job.model_validate({"model": {"config": toy_config("deepseek_v3")}})
    made: Any = build_model(job)
    for block in made.model.layers:
        block.self_attn.sinks = nn.Parameter(torch.empty(4, device="meta"))
    facts = discover(made, job)
    kinds = {facts.tensor_splits[f"model.layers.0.self_attn.{name}"].kind for name in ("q_b_proj", "o_proj")}
    assert kinds == {"gathered"} and "leaves its attention whole" in facts.heads_whole


def test_layers_that_no_region_covers_are_split_by_outputs() -> None:
    """A hybrid: heads and MLPs as its plan says, the linear attention of other blocks by outputs."""
    facts, kinds = _kinds_of("qwen3_next", 0)
    assert kinds["linear_attn.out_proj"] == "gathered" and kinds["mlp.shared_expert.up_proj"] == "column"
    attending = {split.kind for name, split in facts.tensor_splits.items() if ".self_attn." in name}
    assert attending == {"column", "row", "partial"} and not facts.heads_whole


def test_plans_that_cannot_be_right_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that gathers inside of a region, and one that shares the heads of some blocks alone."""
    rules = {f"layers.*.{name}": COLUMN for name in ("self_attn.q_proj", "self_attn.k_proj")}
    rules |= {"layers.*.self_attn.v_proj": TensorSplit("gathered"), "layers.*.self_attn.o_proj": ROW}
    llama = model("llama", intermediate_size=12)
    _give_record(monkeypatch, Family(("llama",), tensor_splits=rules))
    assert "v_proj' of llama is gathered between layers whose parts stay apart" in _refusal(llama)
    assert plans.attention_split({"0.attention.q": COLUMN}, ("0.attention", "1.attention")) == "in some layers"
    assert plans.attention_split({"0.mlp.up": COLUMN}, ("0.attention",)) == "nowhere"
    assert plans.attention_split({"0.attention.q": COLUMN}, ("0.attention", "")) == "everywhere"
    assert plans.attention_split({"0.attention.q": COLUMN}, ()) == "everywhere"
    assert plans.attention_split({"0.experts": TensorSplit("experts")}, ()) == "nowhere"


def test_ranks_that_would_draw_other_numbers_are_refused() -> None:
    """PhiMoE's routers; the scalars by which BART may drop a layer are another matter."""
    for model_type, task, is_refused in (("phimoe", "causal_lm", True), ("bart", "seq2seq_lm", False)):
        job = Job.model_validate({"model": {"config": toy_config(model_type), "task": task}})
        facts = discover(build_model(job), job)
        assert facts.draws_numbers is is_refused  # which data ranks draw alike in equal microbatches
        assert ("draws random numbers" in facts.supports(Axis.TENSOR).reason) is is_refused
        assert ("draws random numbers" in facts.supports(Axis.CONTEXT).reason) is is_refused


def test_a_layer_whose_weight_other_code_reads_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    llama: Any = model("llama", intermediate_size=12)
    monkeypatch.setattr(
        type(llama.model.layers[0].mlp),
        "forward",
        lambda self, x: self.down_proj(self.gate_proj(x) * nn.functional.linear(x, self.up_proj.weight)),
    )
    called = probe_forward(llama, find_block_lists(llama), 4).called_linears
    assert {name.rpartition(".")[2] for name in called if "mlp" in name} == {"gate_proj", "down_proj"}
    assert len(called) == 6


def test_a_layer_whose_weight_a_kernel_for_gpus_reads_stays_whole() -> None:
    """Mamba's code names the weights of all but one of its layers, on a path that no CPU takes."""
    job = Job.model_validate({"model": {"config": toy_config("mamba")}})
    splits = discover(build_model(job), job).mixer_outputs
    assert splits and {name.rpartition(".")[2] for name in splits} == {"in_proj"}


def test_a_layer_that_is_read_and_never_called_has_no_adapter() -> None:
    """The weight of Mamba's `dt_proj` is multiplied by its mixer; what is added to the layer would do nothing."""
    model_section = {"config": toy_config("mamba")}
    every = Job.model_validate({"model": model_section, "adapter": {"kind": "lora"}})
    facts = discover(build_model(every), every)
    assert {name.rpartition(".")[2] for name in facts.read_linears} == {"dt_proj"}
    assert {name.rpartition(".")[2] for name in facts.adapters} == {"in_proj", "x_proj", "out_proj"}
    named = Job.model_validate({"model": model_section, "adapter": {"kind": "lora", "target_modules": ["dt_proj"]}})
    with pytest.raises(LegalityError, match="reads the weight of 'dt_proj' without calling it"):
        resolve(named, World(1, "cpu", 1), discover(build_model(named), named))


def _missing(made: nn.Module, name: str) -> bool:
    """Defaults of transformers' plan name modules that GPT-NeoX calls otherwise."""
    return name.removesuffix(".*") not in dict(made.named_modules())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("family", ["gpt2", "gptj", "gpt_neo", "opt", "bloom", "falcon", "llama", "qwen3", "gpt_neox"])
def test_every_matrix_of_a_block_is_split(family: str) -> None:
    job = Job.model_validate({"model": {"config": {"model_type": family, **TENSOR_CONFIGS[family]}}})
    facts = discover(build_model(job), job)
    blocks = tuple(f"{block.name}." for block in facts.blocks)
    matrices = {name for name, shape in facts.parameter_shapes.items() if name.startswith(blocks) and len(shape) > 1}
    split = {name for name, how in facts.tensor_splits.items() if how.kind in ("column", "row")}
    assert {name.removesuffix(".weight") for name in matrices} == split
    assert facts.sequence_parallel.ok


def test_the_sequence_is_not_shared_where_positions_may_meet() -> None:
    splits = {"h.0.up": COLUMN, "h.0.down": ROW}
    shapes: dict[str, tuple[int, ...]] = {"h.0.up.weight": (4, 2), "h.0.down.weight": (2, 4), "h.0.norm.weight": (2,)}
    assert plans.sequence_capability(shapes, ["h.0"], splits, is_chain=True).ok
    assert "one chain" in plans.sequence_capability(shapes, ["h.0"], splits, is_chain=False).reason
    assert "no plan" in plans.sequence_capability(shapes, ["h.0"], {}, is_chain=True).reason
    convolution = {**shapes, "h.0.mix.weight": (2, 1, 3)}
    assert "'h.0.mix.weight'" in plans.sequence_capability(convolution, ["h.0"], splits, is_chain=True).reason


def test_a_plan_that_names_the_input_embeddings_too_is_none_the_less_taken() -> None:
    """Transformers 5.17 names them in every tied model's configuration; a table inside of a block is another matter."""
    llama = model("llama", intermediate_size=8, tie_word_embeddings=True)
    splits, _ = plans.tensor_plan(llama)
    assert splits and not any("embed_tokens" in name for name in splits)
    plan = dict(llama.config.base_model_tp_plan)
    llama.config.base_model_tp_plan = {**plan, "embed_tokens": "embedding_rowwise", "elsewhere": "embedding_rowwise"}
    assert plans.tensor_plan(llama) == (splits, SUPPORTED)


def test_a_row_layer_without_its_column_layers_is_left_out() -> None:
    """As where the attention of some layers is of another kind, with one projection of the same name."""
    llama: Any = model("llama", intermediate_size=8)
    splits = plans.tensor_plan(llama)[0]
    attention = llama.model.layers[0].self_attn
    attention.mix = nn.Linear(8, 8, device="meta")
    del attention.q_proj, attention.k_proj, attention.v_proj
    kept = {name: split for name, split in splits.items() if ".self_attn." not in name}
    assert plans.tensor_plan(llama) == (kept, SUPPORTED)


def test_a_module_with_a_style_that_is_unknown_is_left_out_as_a_whole() -> None:
    """A row layer without its column layer would be given what is whole."""
    llama = model("llama", intermediate_size=8)
    splits, plan = plans.tensor_plan(llama)[0], dict(llama.config.base_model_tp_plan)
    for rule in ("layers.*.mlp.up_proj", "layers.*.mlp.down_proj"):
        llama.config.base_model_tp_plan = {**plan, rule: "packed_rowwise"}
        assert plans.tensor_plan(llama) == ({name: splits[name] for name in splits if ".mlp." not in name}, SUPPORTED)
    llama.config.base_model_tp_plan = {**plan, "layers.*.self_attn": "local_params"}
    assert plans.tensor_plan(llama) == ({name: splits[name] for name in splits if ".mlp." in name}, SUPPORTED)
