"""Directories as the Hub has them give bit for bit what transformers' `from_pretrained` makes of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from shardwise.checkpoint.reading import HuggingFaceWeights
from shardwise.errors import ModelError
from shardwise.job.schema import Job
from shardwise.model.build import build_model
from shardwise.model.discover import discover
from shardwise.plan.draft import World
from shardwise.plan.plan import resolve as resolve_plan
from shardwise.testing.toy_configs import toy_config
from shardwise.training.init import match_weights
from shardwise.training.setup import study
from tests.checkpoint.models import assert_reads_all, make_model, resolve
from tests.model import toys

Tensors = dict[str, Tensor]
EXPERTS = {"num_experts_per_tok": 2, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def _gpt2_of_the_hub(tensors: Tensors) -> Tensors:
    """No prefix, no head, and the masks that attention once kept as buffers."""
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    masks = {f"h.{i}.attn.bias": torch.ones(1, 1, 64, 64).tril() for i in range(2)}
    return bare | masks | {f"h.{i}.attn.masked_bias": torch.tensor(-1e4) for i in range(2)}


def _neox_of_the_hub(tensors: Tensors) -> Tensors:
    """The head under its own name, attention's buffers of before."""
    named = {name.replace("lm_head.", "embed_out."): tensor for name, tensor in tensors.items()}
    layer = "gpt_neox.layers.0.attention"
    old = {
        "bias": torch.ones(1, 1, 64, 64).bool(),
        "masked_bias": torch.tensor(-1e9),
        "rotary_emb.inv_freq": torch.ones(1),
    }
    return named | {f"{layer}.{name}": tensor for name, tensor in old.items()}


def _bert_of_the_hub(tensors: Tensors) -> Tensors:
    """Norms with gamma and beta, the head's tied names stored again, heads and ids that the model lacks."""
    named = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in tensors.items()
    }
    twins = {"cls.predictions.decoder.weight": tensors["bert.embeddings.word_embeddings.weight"]}
    extras = {"cls.seq_relationship.weight": torch.ones(2, 32), "bert.embeddings.position_ids": torch.arange(64)}
    return named | twins | extras


def _gpt2_with_its_head_only(tensors: Tensors) -> Tensors:
    """The tied tensor under its other name."""
    return {name: tensor for name, tensor in tensors.items() if name != "transformer.wte.weight"}


def _llama_of_old(tensors: Tensors) -> Tensors:
    """Rotary frequencies of every layer, the tied head left out."""
    kept = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    return kept | {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(2)}


QUIRKS: list[tuple[str, Callable[[Tensors], Tensors]]] = [
    ("gpt2", _gpt2_of_the_hub),
    ("gpt2", _gpt2_with_its_head_only),
    ("gpt_neox", _neox_of_the_hub),
    ("bert", _bert_of_the_hub),
    ("llama", _llama_of_old),
]


def _from_pretrained(path: Path, config: PreTrainedConfig) -> PreTrainedModel:
    kind = AutoModelForMaskedLM if config.model_type in toys.MASKED else AutoModelForCausalLM
    model, info = kind.from_pretrained(path, output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"]
    return model


@pytest.mark.sampled(2)
@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("model_type, quirk", QUIRKS, ids=[quirk.__name__.strip("_") for _, quirk in QUIRKS])
def test_hub_directory_equals_from_pretrained(
    tmp_path: Path, model_type: str, quirk: Callable[[Tensors], Tensors], file: str
) -> None:
    saved = make_model(model_type, **({"tie_word_embeddings": True} if model_type == "llama" else {}))
    saved.config.architectures = [type(saved).__name__]
    saved.config.save_pretrained(tmp_path)
    plain = {name: parameter.detach().clone() for name, parameter in saved.named_parameters(remove_duplicate=False)}
    tensors = quirk(plain)
    assert tensors.keys() != plain.keys()
    if file == "pytorch_model.bin":
        torch.save(tensors, tmp_path / file)
    else:
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, tmp_path / file, {"format": "pt"})
    opened = _from_pretrained(tmp_path, saved.config)
    assert_reads_all(tmp_path, opened)
    assert_reads_all(tmp_path, saved)
    task = "masked_lm" if model_type in toys.MASKED else "causal_lm"
    job = Job.model_validate({"model": {"path": str(tmp_path), "task": task}})
    model = build_model(job)
    facts = discover(model, job)
    weights, names = match_weights(model, facts, Job.model_validate({"model": {"path": str(tmp_path)}}))
    assert list(names) == list(facts.parameter_shapes)  # no old mask among them
    expected = dict(opened.named_parameters(remove_duplicate=False))
    assert names.keys() <= expected.keys() and {id(expected[name]) for name in names} == {
        id(parameter) for parameter in opened.parameters()
    }
    assert all(torch.equal(weights.read(names[name]), expected[name].detach()) for name in names)


def test_files_with_a_prefix_that_the_model_lacks(tmp_path: Path) -> None:
    make_model("gpt2").save_pretrained(tmp_path)
    resolved = HuggingFaceWeights(tmp_path).resolve(["h.0.ln_1.weight"], base_model_prefix="transformer")
    assert resolved == {"h.0.ln_1.weight": "transformer.h.0.ln_1.weight"}


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_quantized_weights_without_a_word_in_the_config_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    make_model("llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors = load_file(file)
    save_file({**tensors, name: tensors[name].to(dtype), f"{name}_scale": torch.ones(1)}, file, {"format": "pt"})
    with pytest.raises(ModelError, match=rf"{name}' is stored as (F8_E4M3|int8).*needs the unquantized model"):
        study(Job.model_validate({"model": {"path": str(tmp_path)}}))


def test_what_a_model_has_no_place_for_is_noted(tmp_path: Path) -> None:
    """Llama with biases in the files and none in the config computes other numbers; an old table of angles is idle."""
    make_model("llama").save_pretrained(tmp_path)
    file, layer = tmp_path / "model.safetensors", "model.layers.0.self_attn"
    more = {f"{layer}.q_proj.bias": torch.ones(24), f"{layer}.rotary_emb.inv_freq": torch.ones(3)}
    save_file({**load_file(file), **more}, file, {"format": "pt"})
    job = Job.model_validate({"model": {"path": str(tmp_path)}, "data": {"sequence_length": 16}})
    (note,) = [note for note in resolve_plan(job, World(1, "cpu", 1), study(job)).notes if "no place" in note]
    assert f"no place for {layer}.q_proj.bias, which its files hold" in note


def test_files_may_lack_what_an_initializer_computes(tmp_path: Path) -> None:
    """Marian's positions, which transformers does not save."""
    values = toy_config("marian")
    AutoModelForSeq2SeqLM.from_config(CONFIG_MAPPING[values.pop("model_type")](**values)).save_pretrained(tmp_path)
    facts = study(Job.model_validate({"model": {"path": str(tmp_path), "task": "seq2seq_lm"}}))
    assert "model.encoder.embed_positions.weight" in facts.parameter_shapes


def test_renamings_are_found_for_a_class_that_fsdp_renamed(tmp_path: Path) -> None:
    model = make_model("gpt_neox")
    model.save_pretrained(tmp_path)
    assert "embed_out.weight" in HuggingFaceWeights(tmp_path).names
    model.__class__ = type("FSDPGPTNeoXForCausalLM", (type(model),), {})
    assert_reads_all(tmp_path, model)


def test_tied_names_that_differ_are_refused(tmp_path: Path) -> None:
    """transformers unties them with a warning; here the model of the plan is what is trained."""
    model = make_model("gpt2")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert_reads_all(tmp_path, model)
    tensors["lm_head.weight"][-1, -1] += 1
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ModelError, match=r"'lm_head\.weight' and 'transformer\.wte\.weight' have different values.*tie"
    ):
        resolve(HuggingFaceWeights(tmp_path), model)


# --- parameters that transformers makes of several tensors, or of a part of one ---------------------------------------


def _mixture(model_type: str) -> PreTrainedModel:
    values = {**toys.GROUPED, **EXPERTS, **MIXTURES[model_type]}
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**values))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()  # experts that are alike would not show their order
    return model


MIXTURES = {
    "mixtral": {"num_local_experts": 11},  # two digits: sorted by number, not by letter
    "qwen3_moe": {"num_experts": 3, "moe_intermediate_size": 24},
    "olmoe": {"num_experts": 3},
    "hrm_text": {},
}


@pytest.mark.parametrize("model_type", MIXTURES)
def test_made_parameters_equal_from_pretrained(tmp_path: Path, model_type: str) -> None:
    saved = _mixture(model_type)
    saved.save_pretrained(tmp_path, max_shard_size=50_000)
    weights = HuggingFaceWeights(tmp_path)
    resolved = resolve(weights, saved)
    assert set(resolved.values()) - set(weights.names)  # some are made
    opened = _from_pretrained(tmp_path, saved.config)
    assert_reads_all(tmp_path, saved)
    assert_reads_all(tmp_path, opened)
    for name, parameter in saved.named_parameters():
        part = weights.read(resolved[name], (slice(1, 2),))
        assert torch.equal(part, parameter.detach()[1:2]) and part.untyped_storage().nbytes() == part.numel() * 4


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    model = _mixture("mixtral")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (lost,) = [name for name in tensors if "layers.0" in name and "experts.7.w1" in name]
    del tensors[lost]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.experts\.gate_up_proj.*experts\.0\.w1"):
        resolve(HuggingFaceWeights(tmp_path), model)
    for name in [name for name in tensors if "layers.0" in name and "experts.7" in name]:
        del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    weights = HuggingFaceWeights(tmp_path)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    with pytest.raises(ModelError, match=r"has shape \[10, .* has \[11, "):
        weights.check_shapes(resolve(weights, model), shapes)
