"""Model directories that are written: they open in transformers, and nothing is left of those that fail."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
)

from shardwise.checkpoint.writing import HuggingFaceWriter, make_sibling, remove_unfinished
from shardwise.errors import OutputError
from shardwise.model.discover import find_ties
from tests.checkpoint.models import assert_reads_all, make_model
from tests.model import toys


def _write(path: Path, model: PreTrainedModel, **options: Any) -> Path:
    generation = model.generation_config if model.can_generate() else None
    with HuggingFaceWriter(
        path, model.config, ties=find_ties(model), generation_config=generation, **options
    ) as writer:
        for name, parameter in model.named_parameters(remove_duplicate=False):
            writer.add(name, parameter)
        return writer.finish()


@pytest.mark.sampled(6)
@pytest.mark.parametrize("model_type", ["gpt2", "gpt_neox", "bert", "roberta", "llama", "bloom", "opt", "gpt_neo"])
@pytest.mark.parametrize("max_shard_bytes", [1 << 30, 9_000])
def test_transformers_opens_what_was_written(tmp_path: Path, model_type: str, max_shard_bytes: int) -> None:
    model = make_model(model_type)
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
    assert_reads_all(path, model)


def test_weights_are_written_where_transformers_refuses_a_config(tmp_path: Path) -> None:
    model = make_model("llama")
    generation = GenerationConfig(do_sample=False, temperature=0.5)
    with HuggingFaceWriter(tmp_path / "out", model.config, generation_config=generation) as writer:
        for name, parameter in model.named_parameters():
            writer.add(name, parameter)
        writer.finish()
    assert_reads_all(tmp_path / "out", model)
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["temperature"] == 0.5
    assert [problem.partition(" has values")[0] for problem in writer.problems] == ["generation_config.json"]


def test_shards_stay_below_their_size(tmp_path: Path) -> None:
    path = _write(tmp_path / "out", make_model("llama"), max_shard_bytes=9_000)
    for shard in path.glob("*.safetensors"):
        tensors = load_file(str(shard))
        assert len(tensors) == 1 or sum(tensor.numel() * 4 for tensor in tensors.values()) <= 9_000
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(p.numel() * 4 for p in make_model("llama").parameters())


def test_config_generation_config_and_dtype(tmp_path: Path) -> None:
    model = make_model("gpt2")
    model.config.use_cache = False
    model.generation_config = GenerationConfig(do_sample=True, temperature=0.5)
    path = _write(tmp_path / "out", model.to(torch.bfloat16))
    config = AutoConfig.from_pretrained(path)
    assert config.dtype is torch.bfloat16 and config.use_cache is True and model.config.use_cache is False
    assert GenerationConfig.from_pretrained(path).temperature == 0.5
    assert next(iter(load_file(str(path / "model.safetensors")).values())).dtype is torch.bfloat16


def test_tokenizer_is_copied_without_weights(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    source = tmp_path / "source"
    make_model("gpt2").save_pretrained(source)
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(source / "tokenizer.json"))
    (source / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (source / "training_state.json").write_text("{}")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    path = _write(tmp_path / "out", make_model("gpt2"), tokenizer_directory=source)
    assert AutoTokenizer.from_pretrained(path)("b a b").input_ids == [1, 0, 1]
    assert not (path / "training_state.json").exists()
    assert (path / "additional_chat_templates" / "tool_use.jinja").read_text() == "{{ tools }}"


def test_a_models_own_code_is_copied(tmp_path: Path) -> None:
    model = make_model("llama")
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "modeling_mine.py").write_text("x = 1\n")
    model.config.name_or_path = str(tmp_path / "source")
    assert not (_write(tmp_path / "plain", model) / "modeling_mine.py").exists()
    model.config.auto_map = {"AutoModelForCausalLM": "modeling_mine.Mine"}
    assert (_write(tmp_path / "own", model) / "modeling_mine.py").read_text() == "x = 1\n"


def test_views_and_transposed_tensors(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    with HuggingFaceWriter(tmp_path / "out", make_model("gpt2").config) as writer:
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
        HuggingFaceWriter(tmp_path / "out", make_model("gpt2").config, max_shard_bytes=8) as w,
    ):
        w.add("a", torch.ones(4))
        w.add("b", torch.ones(4))
        assert list(tmp_path.glob(".out.*/*.safetensors"))
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    for number in range(2):
        HuggingFaceWriter(tmp_path / "out", make_model("gpt2").config)  # and nothing more: it was killed
        assert len(list(tmp_path.iterdir())) == number + 1
    (tmp_path / ".out.mine").mkdir()
    remove_unfinished(tmp_path / "out")
    assert [entry.name for entry in tmp_path.iterdir()] == [".out.mine"]
    remove_unfinished(tmp_path / "nowhere" / "out")


def test_an_existing_directory_is_replaced_only_when_asked(tmp_path: Path) -> None:
    model = make_model("gpt2")
    path = _write(tmp_path / "out", model)
    (path / "note.txt").write_text("mine")
    with pytest.raises(OutputError, match="exists already"):
        _write(path, model)
    assert (path / "note.txt").exists()
    _write(path, model, overwrite=True)
    assert not (path / "note.txt").exists() and [entry.name for entry in tmp_path.iterdir()] == ["out"]
    (tmp_path / "empty").mkdir()
    assert_reads_all(_write(tmp_path / "empty", model), model)


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written"):
        HuggingFaceWriter(tmp_path / "file" / "out", make_model("gpt2").config)


def test_others_may_read_the_directory(tmp_path: Path) -> None:
    path = _write(tmp_path / "out", make_model("gpt2"))
    (tmp_path / "plain").mkdir()
    assert os.stat(path).st_mode == os.stat(tmp_path / "plain").st_mode


def test_a_name_is_added_once(tmp_path: Path) -> None:
    with HuggingFaceWriter(tmp_path / "out", make_model("gpt2").config) as writer:
        writer.add("a", torch.ones(2))
        with pytest.raises(ValueError, match="'a' was added before"):
            writer.add("a", torch.ones(2))
        writer.abort()
    assert list(tmp_path.iterdir()) == []


def test_the_current_directory_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (Path(), tmp_path):
        with pytest.raises(OutputError, match="is the current directory, and is not replaced; give a new directory"):
            make_sibling(path)
    monkeypatch.setattr("os.path.ismount", lambda path: path == tmp_path / "volume")
    with pytest.raises(OutputError, match="volume is where a file system is mounted"):
        make_sibling(tmp_path / "volume")
    assert list(tmp_path.iterdir()) == [] and not list(tmp_path.parent.glob("..*"))
