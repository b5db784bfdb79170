"""Model directories: slices are read rightly, broken files are named, what is written opens in transformers."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
)

from shardwise.checkpoint.hugging_face import HuggingFaceWeights, HuggingFaceWriter
from shardwise.errors import ModelError, OutputError
from shardwise.families.discovery import find_ties
from tests.families import toys


def _model(model_type: str, **config: Any) -> PreTrainedModel:
    kind = AutoModelForMaskedLM if model_type in toys.MASKED else AutoModelForCausalLM
    torch.manual_seed(1)
    values = {**toys.CONFIGS[model_type], "bos_token_id": None, "eos_token_id": None, **config}
    return kind.from_config(CONFIG_MAPPING[model_type](**values)).eval()


def _message(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        HuggingFaceWeights(path)
    return str(caught.value)


def _resolve(weights: HuggingFaceWeights, model: PreTrainedModel) -> dict[str, str]:
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return weights.resolve(names, base_model_prefix=model.base_model_prefix, ties=find_ties(model), model=model)


def _assert_reads_all(path: Path, model: PreTrainedModel) -> None:
    weights = HuggingFaceWeights(path)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    resolved = _resolve(weights, model)
    assert list(resolved) == list(parameters)
    weights.check_shapes(resolved, {name: parameter.shape for name, parameter in parameters.items()})
    for name, parameter in parameters.items():
        torch.testing.assert_close(weights.read(resolved[name]), parameter.detach(), rtol=0, atol=0)


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[tuple[Path, PreTrainedModel]]:
    model = _model("gpt2")
    model.save_pretrained(tmp_path / "model")
    yield tmp_path / "model", model


# --- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["gpt2", "gpt_neox", "bert", "roberta", "llama", "opt", "bloom"])
def test_reads_what_transformers_wrote(tmp_path: Path, model_type: str) -> None:
    model = _model(model_type)
    model.save_pretrained(tmp_path)
    _assert_reads_all(tmp_path, model)


def test_reads_sharded_files(tmp_path: Path) -> None:
    model = _model("llama")
    model.save_pretrained(tmp_path, max_shard_size=20_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    _assert_reads_all(tmp_path, model)


def test_reads_a_slice(tmp_path: Path) -> None:
    whole = torch.arange(60.0).reshape(5, 4, 3)
    save_file({"a": whole, "scalar": torch.tensor(7)}, str(tmp_path / "model.safetensors"))
    weights = HuggingFaceWeights(tmp_path)
    assert weights.names == ("a", "scalar") and weights.shape("a") == (5, 4, 3) and weights.shape("scalar") == ()
    for slices in [(slice(1, 3),), (slice(0, 5), slice(2, 4)), (slice(2, 2),), (slice(4, 5), slice(0, 1), slice(1, 3))]:
        part = weights.read("a", slices)
        torch.testing.assert_close(part, whole[slices], rtol=0, atol=0)
        assert part.untyped_storage().nbytes() == part.numel() * 4  # nothing else came along
    assert weights.read("scalar").item() == 7 and weights.read("scalar", ()).item() == 7


def test_base_model_without_its_prefix_and_with_old_extras(tmp_path: Path) -> None:
    model = _model("gpt2")
    tensors = {name: parameter.detach().clone() for name, parameter in model.transformer.named_parameters()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 4, 4)
    save_file(tensors, str(tmp_path / "model.safetensors"))
    _assert_reads_all(tmp_path, model)


def test_files_with_a_prefix_that_the_model_lacks(tmp_path: Path) -> None:
    model = _model("gpt2")
    model.save_pretrained(tmp_path)
    weights = HuggingFaceWeights(tmp_path)
    resolved = weights.resolve(["h.0.ln_1.weight"], base_model_prefix="transformer")
    assert resolved == {"h.0.ln_1.weight": "transformer.h.0.ln_1.weight"}


def test_norms_under_their_old_names(tmp_path: Path) -> None:
    model = _model("bert")
    model.save_pretrained(tmp_path)
    tensors = load_file(str(tmp_path / "model.safetensors"))
    old = {
        k.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensors[k]
        for k in tensors
    }
    assert old.keys() != tensors.keys()
    save_file(old, str(tmp_path / "model.safetensors"))
    _assert_reads_all(tmp_path, model)


def test_missing_tensors_are_named(saved: tuple[Path, PreTrainedModel]) -> None:
    path, model = saved
    tensors = load_file(str(path / "model.safetensors"))
    tensors["transformer.h.1.ln_9.weight"] = tensors.pop("transformer.h.1.ln_1.weight")
    save_file(tensors, str(path / "model.safetensors"))
    with pytest.raises(ModelError, match=r"lack 1 tensor .*h\.1\.ln_1\.weight.*unused in the files: .*ln_9"):
        _resolve(HuggingFaceWeights(path), model)
    with pytest.raises(ModelError, match="no tensor 'nothing'"):
        HuggingFaceWeights(path).read("nothing")


def test_shape_mismatch_shows_both_shapes(saved: tuple[Path, PreTrainedModel]) -> None:
    path, _ = saved
    wider = _model("gpt2", n_embd=64)
    weights = HuggingFaceWeights(path)
    shapes = {name: parameter.shape for name, parameter in wider.named_parameters(remove_duplicate=False)}
    with pytest.raises(
        ModelError, match=r"model\.safetensors.*'transformer\.wte\.weight' has shape \[97, 32\].*\[97, 64\]"
    ):
        weights.check_shapes(_resolve(weights, wider), shapes)


def test_renamings_are_found_for_a_class_that_fsdp_renamed(tmp_path: Path) -> None:
    model = _model("gpt_neox")
    model.save_pretrained(tmp_path)
    assert "embed_out.weight" in HuggingFaceWeights(tmp_path).names
    model.__class__ = type("FSDPGPTNeoXForCausalLM", (type(model),), {})
    _assert_reads_all(tmp_path, model)


def test_experts_that_transformers_would_stack_are_refused(tmp_path: Path) -> None:
    values = {**toys.GROUPED, "num_local_experts": 2, "bos_token_id": None, "eos_token_id": None}
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["mixtral"](**values))
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"experts.*transformers converts tensors of this kind of model"):
        _resolve(HuggingFaceWeights(tmp_path), model)


def test_what_was_read_does_not_share_memory(saved: tuple[Path, PreTrainedModel]) -> None:
    weights = HuggingFaceWeights(saved[0])
    before = weights.read("transformer.wte.weight")
    weights.read("transformer.wte.weight").add_(1)
    weights.read("transformer.wte.weight", (slice(0, 2),)).add_(1)
    torch.testing.assert_close(weights.read("transformer.wte.weight"), before, rtol=0, atol=0)


@pytest.mark.parametrize("keep", [0, 5, 200, -40])
def test_truncated_file_is_named(saved: tuple[Path, PreTrainedModel], keep: int) -> None:
    file = saved[0] / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    message = _message(saved[0])
    assert str(file) in message and "truncated" in message


def test_corrupt_header_is_named(saved: tuple[Path, PreTrainedModel]) -> None:
    file = saved[0] / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[8 : 8 + 40] = b"x" * 40
    file.write_bytes(bytes(content))
    assert str(file) in _message(saved[0])
    file.write_bytes(struct.pack("<Q", 1 << 40) + bytes(content))
    assert str(file) in _message(saved[0])


def test_broken_index(tmp_path: Path) -> None:
    _model("llama").save_pretrained(tmp_path, max_shard_size=20_000)
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    name, file = next(iter(content["weight_map"].items()))
    other = next(f for f in content["weight_map"].values() if f != file)
    index.write_text(json.dumps({"weight_map": {**content["weight_map"], name: other}}))
    assert name in _message(tmp_path) and "do not hold them" in _message(tmp_path)
    index.write_text(json.dumps({"weight_map": {name: "../elsewhere.safetensors"}}))
    assert "leads out of the directory" in _message(tmp_path)
    index.write_text("{")
    assert "index.json is corrupt" in _message(tmp_path)
    index.write_text(json.dumps(content))
    (tmp_path / file).unlink()
    assert file in _message(tmp_path) and "not there" in _message(tmp_path)


def test_directories_without_weights(tmp_path: Path) -> None:
    assert "does not exist" in _message(tmp_path / "nowhere")
    assert "holds no weights" in _message(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert "pickled weights only" in _message(tmp_path)


# --- writing ---------------------------------------------------------------------------------------------------------


def _write(path: Path, model: PreTrainedModel, **options: Any) -> Path:
    generation = model.generation_config if model.can_generate() else None
    with HuggingFaceWriter(
        path, model.config, ties=find_ties(model), generation_config=generation, **options
    ) as writer:
        for name, parameter in model.named_parameters(remove_duplicate=False):
            writer.add(name, parameter)
        return writer.finish()


@pytest.mark.parametrize("model_type", ["gpt2", "gpt_neox", "bert", "roberta", "llama", "bloom", "opt", "gpt_neo"])
@pytest.mark.parametrize("max_shard_bytes", [1 << 30, 9_000])
def test_transformers_opens_what_was_written(tmp_path: Path, model_type: str, max_shard_bytes: int) -> None:
    model = _model(model_type)
    path = _write(tmp_path / "out", model, max_shard_bytes=max_shard_bytes)
    kind = AutoModelForMaskedLM if model_type in toys.MASKED else AutoModelForCausalLM
    opened, info = kind.from_pretrained(path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    tokens = torch.arange(10).reshape(1, 10)
    with torch.no_grad():
        torch.testing.assert_close(opened.eval()(tokens).logits, model(tokens).logits, rtol=0, atol=0)
    shards = sorted(path.glob("*.safetensors"))
    assert (len(shards) > 1) == (path / "model.safetensors.index.json").exists() == (max_shard_bytes == 9_000)
    assert sum(len(load_file(str(shard))) for shard in shards) == len(list(model.parameters()))  # ties once
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
    _assert_reads_all(path, model)


def test_shards_stay_below_their_size(tmp_path: Path) -> None:
    path = _write(tmp_path / "out", _model("llama"), max_shard_bytes=9_000)
    for shard in path.glob("*.safetensors"):
        tensors = load_file(str(shard))
        assert len(tensors) == 1 or sum(tensor.numel() * 4 for tensor in tensors.values()) <= 9_000
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(p.numel() * 4 for p in _model("llama").parameters())


def test_config_generation_config_and_dtype(tmp_path: Path) -> None:
    model = _model("gpt2")
    model.config.use_cache = False
    model.generation_config = GenerationConfig(do_sample=True, temperature=0.5)
    path = _write(tmp_path / "out", model.to(torch.bfloat16))
    config = AutoConfig.from_pretrained(path)
    assert config.dtype is torch.bfloat16 and config.use_cache is True and model.config.use_cache is False
    assert GenerationConfig.from_pretrained(path).temperature == 0.5
    assert next(iter(load_file(str(path / "model.safetensors")).values())).dtype is torch.bfloat16


def test_tokenizer_is_copied_without_weights(tmp_path: Path, saved: tuple[Path, PreTrainedModel]) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(saved[0] / "tokenizer.json"))
    (saved[0] / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (saved[0] / "training_state.json").write_text("{}")
    path = _write(tmp_path / "out", saved[1], tokenizer_directory=saved[0])
    assert AutoTokenizer.from_pretrained(path)("b a b").input_ids == [1, 0, 1]
    assert not (path / "training_state.json").exists()


def test_a_models_own_code_is_copied(tmp_path: Path) -> None:
    model = _model("llama")
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "modeling_mine.py").write_text("x = 1\n")
    model.config.name_or_path = str(tmp_path / "source")
    assert not (_write(tmp_path / "plain", model) / "modeling_mine.py").exists()
    model.config.auto_map = {"AutoModelForCausalLM": "modeling_mine.Mine"}
    assert (_write(tmp_path / "own", model) / "modeling_mine.py").read_text() == "x = 1\n"


def test_views_and_transposed_tensors(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    with HuggingFaceWriter(tmp_path / "out", _model("gpt2").config) as writer:
        for name, tensor in {"t": base.t(), "rows": base[1:3], "again": base}.items():
            writer.add(name, nn.Parameter(tensor))
        base.add_(100)  # what was handed over does not change any more
        writer.finish()
    read = load_file(str(tmp_path / "out" / "model.safetensors"))
    expected = torch.arange(24.0).reshape(4, 6)
    assert torch.equal(read["t"], expected.t()) and torch.equal(read["rows"], expected[1:3])


def test_nothing_is_left_of_a_failed_export(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError),
        HuggingFaceWriter(tmp_path / "out", _model("gpt2").config, max_shard_bytes=8) as w,
    ):
        w.add("a", torch.ones(4))
        w.add("b", torch.ones(4))
        assert list(tmp_path.glob(".out.*/*.safetensors"))
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_an_existing_directory_is_replaced_only_when_asked(tmp_path: Path) -> None:
    model = _model("gpt2")
    path = _write(tmp_path / "out", model)
    (path / "note.txt").write_text("mine")
    with pytest.raises(OutputError, match="exists already"):
        _write(path, model)
    assert (path / "note.txt").exists()
    _write(path, model, overwrite=True)
    assert not (path / "note.txt").exists() and [entry.name for entry in tmp_path.iterdir()] == ["out"]
    (tmp_path / "empty").mkdir()
    _assert_reads_all(_write(tmp_path / "empty", model), model)


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written"):
        HuggingFaceWriter(tmp_path / "file" / "out", _model("gpt2").config)


def test_others_may_read_the_directory(tmp_path: Path) -> None:
    path = _write(tmp_path / "out", _model("gpt2"))
    (tmp_path / "plain").mkdir()
    assert os.stat(path).st_mode == os.stat(tmp_path / "plain").st_mode


def test_a_name_is_added_once(tmp_path: Path) -> None:
    with HuggingFaceWriter(tmp_path / "out", _model("gpt2").config) as writer:
        writer.add("a", torch.ones(2))
        with pytest.raises(ValueError, match="'a' was added before"):
            writer.add("a", torch.ones(2))
        writer.abort()
    assert list(tmp_path.iterdir()) == []
