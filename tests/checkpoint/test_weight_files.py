"""Files of `torch.save`: read like safetensors, by slices; what is hostile or broken is named and runs no code."""

from __future__ import annotations

import json
import os
import pickle
import random
import textwrap
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from shardwise.checkpoint.reading import HuggingFaceWeights
from shardwise.checkpoint.weight_files import TorchFile, open_weight_files
from shardwise.errors import ModelError
from tests.checkpoint.models import assert_reads_all, make_model
from tests.fork_server import run_python

NEW_AND_OLD = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before torch 1.6"])


def _save(content: object, file: Path, zipped: bool = True) -> Path:
    torch.save(content, file, _use_new_zipfile_serialization=zipped)
    return file


def _message(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        HuggingFaceWeights(path)
    message = str(caught.value)
    assert "weights_only" not in message or "TorchScript" in message  # torch's advice to switch it off is not repeated
    return message


def _sharded(path: Path, zipped: bool = True) -> Any:
    """A directory of two `.bin` shards and an index; returns the model."""
    model = make_model("llama")
    tensors = list(model.state_dict().items())
    halves = {"pytorch_model-00001-of-00002.bin": tensors[::2], "pytorch_model-00002-of-00002.bin": tensors[1::2]}
    for file, half in halves.items():
        _save(OrderedDict(half), path / file, zipped)
    weight_map = {name: file for file, half in halves.items() for name, _ in half}
    (path / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return model


# --- reading ---------------------------------------------------------------------------------------------------------


@NEW_AND_OLD
@pytest.mark.parametrize("model_type", ["gpt2", "gpt_neox", "bert"])
def test_reads_one_file(tmp_path: Path, model_type: str, zipped: bool) -> None:
    model = make_model(model_type)
    _save(model.state_dict(), tmp_path / "pytorch_model.bin", zipped)
    assert_reads_all(tmp_path, model)


@NEW_AND_OLD
def test_reads_sharded_files(tmp_path: Path, zipped: bool) -> None:
    assert_reads_all(tmp_path, _sharded(tmp_path, zipped))


@NEW_AND_OLD
def test_reads_slices_of_any_storage(tmp_path: Path, zipped: bool) -> None:
    whole = torch.arange(60.0).reshape(5, 4, 3)
    content = {
        "plain": whole,
        "parameter": nn.Parameter(whole),
        "turned": whole.permute(2, 0, 1),
        "view": whole[1:3],
        "half": whole.bfloat16(),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(7),
        "step": 3,
    }
    weights = HuggingFaceWeights(_save(content, tmp_path / "pytorch_model.bin", zipped).parent)
    assert weights.names == tuple(content)[:-1]
    for name in weights.names:
        expected = content[name].detach()
        assert weights.shape(name) == tuple(expected.shape)
        for slices in [(), (slice(1, 2),), (slice(0, 2), slice(1, 3))] if expected.dim() > 1 else [()]:
            part = weights.read(name, slices)
            assert torch.equal(part, expected[slices]) and part.dtype is expected.dtype and part.is_contiguous()
            assert part.untyped_storage().nbytes() == part.numel() * part.element_size()
            part.zero_()
        assert torch.equal(weights.read(name), expected)  # nobody writes into the file


def test_a_slice_costs_its_own_pages_only(tmp_path: Path) -> None:
    _save({"a": torch.ones(64, 1 << 18), "b": torch.ones(64, 1 << 18)}, tmp_path / "pytorch_model.bin")  # 2 x 64 MiB
    process = psutil.Process()
    before = process.memory_info().rss
    weights = HuggingFaceWeights(tmp_path)
    part = weights.read("b", (slice(20, 22),))  # 2 MiB
    assert process.memory_info().rss - before < 16 << 20
    assert torch.equal(part, torch.ones(2, 1 << 18))


def test_one_old_file_at_a_time_is_in_memory(tmp_path: Path) -> None:
    files = [_save({name: torch.ones(2)}, tmp_path / f"{name}.bin", zipped=False) for name in "abc"]
    opened = open_weight_files(files)
    held = [file._held for file in opened.values() if isinstance(file, TorchFile)]
    assert held[0] is held[1] is held[2] and list(held[0]) == [files[2]]
    assert opened[files[0]].read("a").tolist() == [1, 1] and list(held[0]) == [files[0]]


# --- hostile files ---------------------------------------------------------------------------------------------------


class Bomb:
    """Leaves a mark where unpickling calls what a file asks for."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def _bombs(path: Path, mark: Path) -> dict[str, bytes]:
    """File contents that would make `mark`; unpickled without protection they do."""
    bomb = {"a": torch.ones(2), "b": Bomb(mark)}
    contents = {
        "zip": _save(bomb, path / "x").read_bytes(),
        "old": _save(bomb, path / "x", zipped=False).read_bytes(),
        "raw": pickle.dumps(Bomb(mark), protocol=2),
        "raw, protocol 4": pickle.dumps(Bomb(mark), protocol=4),
        "import": b"cplanted_module\nanything\n.",
        "python 2": b"cos\nmkdir\n(V%s\ntR." % str(mark).encode(),
    }
    with zipfile.ZipFile(path / "x", "w") as archive:  # an archive of torch's, its pickle replaced
        archive.writestr("archive/data.pkl", contents["raw"])
        archive.writestr("archive/version", "3\n")
    contents["zip of a raw pickle"] = (path / "x").read_bytes()
    (path / "x").unlink()
    return contents


WATCH = """
import json, pickle, sys
import torch
from shardwise.checkpoint.reading import HuggingFaceWeights
from shardwise.errors import ModelError

watched, seen = ("pickle.find_class", "os.mkdir", "os.system", "subprocess.Popen", "import"), []
sys.addaudithook(lambda event, values: seen.append([event, *map(str, values[:2])]) if event in watched else None)
sys.path.insert(0, sys.argv[1])
found = {}
for directory in sys.argv[2:]:
    seen.clear()
    try:
        HuggingFaceWeights(directory)
        found[directory] = ["opened", list(seen)]
    except ModelError as error:
        found[directory] = [str(error), list(seen)]
seen.clear()
pickle.loads(b"ccollections\\nOrderedDict\\n.")
print(json.dumps({"found": found, "control": seen}))
"""


def test_bombs_run_no_code(tmp_path: Path) -> None:
    """Watched from inside the process: no name is looked up by pickle, nothing is imported, made or started."""
    mark = tmp_path / "mark"
    (tmp_path / "planted_module.py").write_text(f"import os\nos.mkdir({str(mark)!r})\nanything = 1\n")
    names = {}
    for name, content in _bombs(tmp_path, mark).items():
        directory = tmp_path / f"directory {name}"
        directory.mkdir()
        (directory / "pytorch_model.bin").write_bytes(content)
        names[str(directory)] = name
    _save({"a": torch.ones(2), "p": nn.Parameter(torch.ones(2))}, tmp_path / "pytorch_model.bin")
    done = run_python("-c", textwrap.dedent(WATCH), tmp_path, *names, tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    found = result["found"]
    assert result["control"] == [["pickle.find_class", "collections", "OrderedDict"]]
    assert found.pop(str(tmp_path))[0] == "opened"
    for directory, (message, seen) in found.items():
        assert message.startswith(f"{directory}/pytorch_model.bin "), names[directory]
        assert [event for event in seen if event[0] != "import" or "planted" in event[1]] == [], names[directory]
        if names[directory] in ("zip", "old"):
            assert "asks for 'posix.mkdir', which no tensor needs; code out of weight files is never run" in message
    assert not mark.exists()


def test_the_bombs_are_live(tmp_path: Path) -> None:
    """Without protection they leave their mark: the test above has something to find."""
    for name, content in _bombs(tmp_path, tmp_path / "mark").items():
        if name == "import":
            continue
        (tmp_path / "x").write_bytes(content)
        if name in ("zip", "old", "zip of a raw pickle"):
            torch.load(tmp_path / "x", weights_only=False)
        else:
            pickle.loads(content)
        (tmp_path / "mark").rmdir()


def test_the_environment_cannot_switch_the_protection_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    _save({"a": Bomb(tmp_path / "mark")}, tmp_path / "pytorch_model.bin")
    assert "never run" in _message(tmp_path) and not (tmp_path / "mark").exists()


class Geometry:
    """A tensor over eight numbers with sizes of the file's choice."""

    def __init__(self, offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> None:
        self.values = (torch.arange(8.0).storage(), offset, size, stride, False, OrderedDict())

    def __reduce__(self) -> tuple[Any, ...]:
        return torch._utils._rebuild_tensor_v2, self.values


@NEW_AND_OLD
@pytest.mark.parametrize(
    "geometry",
    [(0, (1 << 20,), (1,)), (4, (8,), (1,)), (-3, (4,), (1,)), (0, (4,), (-1,)), (0, (1 << 40,), (0,))],
    ids=str,
)
def test_tensors_beyond_their_storage(tmp_path: Path, geometry: tuple[Any, ...], zipped: bool) -> None:
    _save({"a": Geometry(*geometry)}, tmp_path / "pytorch_model.bin", zipped)
    assert str(tmp_path / "pytorch_model.bin") in _message(tmp_path)


@NEW_AND_OLD
def test_flipped_bytes_end_as_an_error_or_as_numbers(tmp_path: Path, zipped: bool) -> None:
    file = _save({"a": torch.ones(2, 3), "b": torch.ones(4)}, tmp_path / "pytorch_model.bin", zipped)
    content = file.read_bytes()
    draw = random.Random(0)
    for _ in range(300):
        changed = bytearray(content)
        for _ in range(draw.choice((1, 1, 4))):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        file.write_bytes(changed)
        try:
            weights = HuggingFaceWeights(tmp_path)
            for name in weights.names:
                weights.read(name)
        except ModelError as error:
            assert str(file) in str(error)


# --- broken files ----------------------------------------------------------------------------------------------------


@NEW_AND_OLD
def test_truncated_file_is_named(tmp_path: Path, zipped: bool) -> None:
    file = _save(make_model("gpt2").state_dict(), tmp_path / "pytorch_model.bin", zipped)
    content = file.read_bytes()
    for keep in (0, 3, 4, 100, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:keep])
        message = _message(tmp_path)
        assert str(file) in message and "truncated" in message


@pytest.mark.parametrize(
    "content, says",
    [
        (torch.ones(2), "holds a Tensor, not tensors by name"),
        ([torch.ones(2)], "holds a list, not tensors by name"),
        ({}, "holds nothing, no tensors by name"),
        ({"model": {"a": torch.ones(2)}, "step": 3}, "holds 'model': dict, 'step': int, no tensors by name"),
        ({7: torch.ones(2)}, "7 is no dense tensor"),
        ({"a": torch.ones(2).to_sparse()}, "'a' is no dense tensor"),
        ({"a": torch.ones(2, device="meta")}, "'a' is no dense tensor"),
        ({"a": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)}, "'a' is no dense tensor"),
        ({"a": torch.ones(1).expand(9)}, "'a' is no dense tensor"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_dict_of_tensors(tmp_path: Path, content: object, says: str) -> None:
    _save(content, tmp_path / "pytorch_model.bin")
    message = _message(tmp_path)
    assert says in message and "save model.state_dict()" in message


def test_code_of_torchscript_is_refused(tmp_path: Path) -> None:
    torch.jit.script(nn.Linear(2, 2)).save(str(tmp_path / "pytorch_model.bin"))
    assert "TorchScript" in _message(tmp_path)


def test_broken_index(tmp_path: Path) -> None:
    _sharded(tmp_path)
    index = tmp_path / "pytorch_model.bin.index.json"
    content = json.loads(index.read_text())["weight_map"]
    name, file = next(iter(content.items()))
    index.write_text(json.dumps({"weight_map": {**content, name: "../pytorch_model.bin"}}))
    assert "pytorch_model.bin.index.json is corrupt" in _message(tmp_path)
    other = next(other for other in content.values() if other != file)
    index.write_text(json.dumps({"weight_map": {**content, name: other}}))
    assert name in _message(tmp_path) and "do not hold them" in _message(tmp_path)
    index.write_text(json.dumps({"weight_map": content}))
    (tmp_path / file).unlink()
    assert f"pytorch_model.bin.index.json names files that are not there: {file}" in _message(tmp_path)
    (tmp_path / file).mkdir()
    assert f"{file} cannot be read" in _message(tmp_path)
