"""Model directories: slices are read rightly, from one file or several; broken files and indexes are named."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from shardwise.checkpoint.reading import HuggingFaceWeights
from shardwise.errors import ModelError
from tests.checkpoint.models import assert_reads_all, make_model, resolve


def _message(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        HuggingFaceWeights(path)
    return str(caught.value)


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[tuple[Path, PreTrainedModel]]:
    model = make_model("gpt2")
    model.save_pretrained(tmp_path / "model")
    yield tmp_path / "model", model


@pytest.mark.parametrize("model_type", ["gpt2", "gpt_neox", "bert", "roberta", "llama", "opt", "bloom"])
def test_reads_what_transformers_wrote(tmp_path: Path, model_type: str) -> None:
    model = make_model(model_type)
    model.save_pretrained(tmp_path)
    assert_reads_all(tmp_path, model)


def test_reads_sharded_files(tmp_path: Path) -> None:
    model = make_model("llama")
    model.save_pretrained(tmp_path, max_shard_size=20_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_reads_all(tmp_path, model)


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


def test_missing_tensors_are_named(saved: tuple[Path, PreTrainedModel]) -> None:
    path, model = saved
    tensors = load_file(str(path / "model.safetensors"))
    tensors["transformer.h.1.ln_9.weight"] = tensors.pop("transformer.h.1.ln_1.weight")
    save_file(tensors, str(path / "model.safetensors"))
    with pytest.raises(ModelError, match=r"lack 1 tensor .*h\.1\.ln_1\.weight.*unused in the files: .*ln_9"):
        resolve(HuggingFaceWeights(path), model)
    with pytest.raises(ModelError, match="no tensor 'nothing'"):
        HuggingFaceWeights(path).read("nothing")


def test_shape_mismatch_shows_both_shapes(saved: tuple[Path, PreTrainedModel]) -> None:
    path, _ = saved
    wider = make_model("gpt2", n_embd=64)
    weights = HuggingFaceWeights(path)
    shapes = {name: parameter.shape for name, parameter in wider.named_parameters(remove_duplicate=False)}
    with pytest.raises(
        ModelError, match=r"model\.safetensors.*'transformer\.wte\.weight' has shape \[97, 32\].*\[97, 64\]"
    ):
        weights.check_shapes(resolve(weights, wider), shapes)


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
    make_model("llama").save_pretrained(tmp_path, max_shard_size=20_000)
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    name, file = next(iter(content["weight_map"].items()))
    other = next(f for f in content["weight_map"].values() if f != file)
    index.write_text(json.dumps({"weight_map": {**content["weight_map"], name: other}}))
    assert name in _message(tmp_path) and "do not hold them" in _message(tmp_path)
    index.write_text(json.dumps({"weight_map": {name: "../elsewhere.safetensors"}}))
    assert "leads out of the directory" in _message(tmp_path)
    for name in ("", "..", "/etc/hostname"):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        assert "leads out of the directory" in _message(tmp_path)
    index.write_text(json.dumps({"weight_map": {}}))
    assert "names no files" in _message(tmp_path)
    index.write_text("{")
    assert "index.json is corrupt" in _message(tmp_path)
    index.write_text(json.dumps(content))
    (tmp_path / file).unlink()
    assert file in _message(tmp_path) and "not there" in _message(tmp_path)


def test_directories_without_weights(tmp_path: Path) -> None:
    assert "does not exist" in _message(tmp_path / "nowhere")
    assert "holds no weights" in _message(tmp_path)


def test_transformers_order_of_preference(tmp_path: Path) -> None:
    """The one file before an index, safetensors before pickles, files without a known name last."""
    torch.save({"a": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    save_file({"a": torch.ones(1)}, str(tmp_path / "adapter.safetensors"))
    assert HuggingFaceWeights(tmp_path).read("a").item() == 0
    (tmp_path / "pytorch_model.bin").unlink()
    assert HuggingFaceWeights(tmp_path).read("a").item() == 1
    torch.save({"a": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    save_file({"a": torch.full((1,), 2.0)}, str(tmp_path / "shard.safetensors"))
    index = {"weight_map": {"a": "shard.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert HuggingFaceWeights(tmp_path).read("a").item() == 2
    save_file({"a": torch.full((1,), 3.0)}, str(tmp_path / "model.safetensors"))
    assert HuggingFaceWeights(tmp_path).read("a").item() == 3
