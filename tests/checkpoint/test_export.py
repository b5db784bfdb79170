"""`shardwise export`: what a checkpoint holds is what transformers opens, without a process group."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from shardwise.checkpoint import export
from shardwise.checkpoint.export import export_checkpoint, restore_config
from shardwise.checkpoint.manifest import FILE, Manifest, Progress
from shardwise.checkpoint.stores import open_store
from shardwise.checkpoint.whole import WholeTensors
from shardwise.errors import CheckpointError, ModelError, OutputError
from shardwise.job.schema import Job
from shardwise.observe.memory import LiveBytes
from shardwise.testing.world import WorldPool
from tests.checkpoint.made import save_steps
from tests.parity.jobs import make_job, make_module_job, tensor_job

Gpt2 = tuple[Path, dict[str, Tensor]]
KINDS = {"bert": AutoModelForMaskedLM}


def into(job: Job, directory: Path) -> Job:
    return job.model_copy(update={"output": str(directory / "run")})


@pytest.fixture(scope="module")
def gpt2(
    world_pool: WorldPool, corpora: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Tensor]]:
    """The output directory of a tied GPT-2 on three ranks with steps 10 and 20, and its weights."""
    directory = tmp_path_factory.mktemp("gpt2")
    job = into(make_job(corpora, "gpt2", precision={"compute": "fp32"}), directory)
    return directory / "run", world_pool.run(3, save_steps, job, [10, 20])[0]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", ["gpt_neox", "llama", "bert"])
def test_transformers_opens_it(world_pool: WorldPool, corpora: Path, tmp_path: Path, family: str) -> None:
    job = into(make_job(corpora, family, tied=False), tmp_path)
    weights = world_pool.run(2, save_steps, job, [1])[0]
    path = export_checkpoint(job.output, tmp_path / "out")
    kind = KINDS.get(family, AutoModelForCausalLM)
    opened, info = kind.from_pretrained(path, dtype="auto", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    found = dict(opened.named_parameters())
    assert found.keys() == weights.keys()
    assert all(found[name].dtype == torch.float64 and torch.equal(found[name], weights[name]) for name in weights)
    assert opened.config.use_cache and opened.config.dtype == torch.float64
    assert (path / "generation_config.json").exists() == (family != "bert")


@pytest.mark.slow
def test_experts_that_tensor_ranks_shared_are_opened(world_pool: WorldPool, corpora: Path, tmp_path: Path) -> None:
    job = into(tensor_job(corpora, "mixtral", tied=False, parallel={"tensor_parallel_degree": 2}), tmp_path)
    weights = world_pool.run(4, save_steps, job, [1])[0]
    opened, info = AutoModelForCausalLM.from_pretrained(
        export_checkpoint(job.output, tmp_path / "out"), dtype="auto", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    found = dict(opened.named_parameters())
    assert found.keys() == weights.keys() and "model.layers.0.mlp.experts.gate_up_proj" in found
    assert all(torch.equal(found[name], weights[name]) for name in weights)


def test_ties_are_stored_once_and_files_are_split(gpt2: Gpt2, tmp_path: Path) -> None:
    said: list[str] = []
    path = export_checkpoint(str(gpt2[0]), tmp_path / "out", say=said.append, max_shard_bytes=8_000)
    assert said == [f"the newest complete checkpoint of {gpt2[0]}/checkpoints is step-00000020"]
    index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 3 and "lm_head.weight" not in index
    opened = AutoModelForCausalLM.from_pretrained(path)
    assert opened.lm_head.weight is opened.transformer.wte.weight
    found = dict(opened.named_parameters())
    assert all(torch.equal(found[name], gpt2[1][name]) for name in found) and found.keys() == gpt2[1].keys()


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_dtype(gpt2: Gpt2, tmp_path: Path, dtype: str) -> None:
    path = export_checkpoint(f"{gpt2[0]}/checkpoints/step-00000010", tmp_path / "out", dtype)
    wanted = export.EXPORT_DTYPES[dtype]
    opened = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    assert opened.config.dtype == wanted
    found = dict(opened.named_parameters())
    assert all(torch.equal(found[name], weight.to(wanted)) for name, weight in gpt2[1].items())


def test_fp16_refuses_what_it_cannot_hold() -> None:
    large = torch.tensor([1.0, 7e4])
    with pytest.raises(OutputError, match=r"cannot hold a.weight, which reaches 7e\+04; use bf16"):
        export.converted("model/a.weight", large, "fp16")
    assert torch.equal(export.converted("buffer/a", large, "fp16"), large)


def test_a_url_and_a_tokenizer(gpt2: Gpt2, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = fsspec.filesystem("memory")
    monkeypatch.setattr(type(memory), "store", {})
    memory.put(f"{gpt2[0]}/checkpoints/", "/there/", recursive=True)
    store, tokenizer, said = open_store("memory://there"), tmp_path / "tokenizer", list[str]()
    manifest = json.loads(store.read("step-00000020", FILE))
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    manifest["data"]["tokenizer"] = str(tokenizer)
    manifest.pop(next(key for key in manifest if "hash" in key or "xxh" in key), None)
    store.commit("step-00000020", Manifest.model_validate(manifest).to_json())
    assert (export_checkpoint("memory://there", tmp_path / "one", say=said.append) / "tokenizer.json").exists()
    shutil.rmtree(tokenizer)
    assert not (export_checkpoint("memory://there", tmp_path / "two", say=said.append) / "tokenizer.json").exists()
    assert said[-1] == f"the tokenizer is not exported: its directory {tokenizer} is not there any more"
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert all(torch.equal(one[name], two[name]) and torch.equal(one[name], gpt2[1][name]) for name in one)


def test_a_module_of_the_users_own(world_pool: WorldPool, corpora: Path, tmp_path: Path) -> None:
    job = into(make_module_job(corpora), tmp_path)
    weights = world_pool.run(2, save_steps, job, [3])[0]
    path = export_checkpoint(f"{job.output}/checkpoints/step-00000003", tmp_path / "out")
    assert [file.name for file in path.iterdir()] == ["model.safetensors"]
    os.umask(mask := os.umask(0))
    assert (path / "model.safetensors").stat().st_mode & 0o777 == 0o666 & ~mask  # others may read it
    found = load_file(path / "model.safetensors")
    assert torch.equal(found.pop("scale"), torch.linspace(0.5, 1.5, 6))
    assert found.keys() == weights.keys() and all(torch.equal(found[name], weights[name]) for name in found)


def test_one_tensor_at_a_time(gpt2: Gpt2, tmp_path: Path) -> None:
    whole = sum(tensor.nbytes for tensor in gpt2[1].values())
    largest = max(tensor.nbytes for tensor in gpt2[1].values())
    with LiveBytes() as memory:
        export_checkpoint(str(gpt2[0]), tmp_path / "out", max_shard_bytes=1)
    assert memory.peak <= 4 * largest < whole  # assembled, handed over, and the shard it waits in


def test_nothing_is_left_of_what_fails(gpt2: Gpt2, tmp_path: Path) -> None:
    shutil.copytree(gpt2[0] / "checkpoints" / "step-00000020", tmp_path / "step-00000020")
    file = tmp_path / "step-00000020" / "rank-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"rank-00001.safetensors is damaged at bytes"):
        export_checkpoint(str(file.parent), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000020"]


def test_what_is_refused(gpt2: Gpt2, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(OutputError, match="exists already; choose another directory"):
        export_checkpoint(str(gpt2[0]), tmp_path / "full")
    with pytest.raises(OutputError, match="is not a local directory"):
        export_checkpoint(str(gpt2[0]), "s3://bucket/out")
    with pytest.raises(CheckpointError, match="holds no checkpoints; give a checkpoint"):
        export_checkpoint(str(tmp_path / "full"), tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"step-00000099 does not exist; .shardwise checkpoint ls"):
        export_checkpoint(f"{gpt2[0]}/checkpoints/step-00000099", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def _manifest(job: Any = None, **content: Any) -> Manifest:
    return Manifest(
        progress=Progress(), optimizer="SGD", tensors={}, files={}, job=job or {}, plan={}, data={}, written="",
        **content,
    )  # fmt: skip


def test_configs_come_back() -> None:
    content = {"model_type": "their_own", "auto_map": {"AutoConfig": "code.Config"}, "width": 3, "limit": float("inf")}
    manifest = _manifest(config=content, versions={"transformers": "9.9"})
    read = Manifest.model_validate_json(manifest.model_dump_json())
    config = restore_config(read)
    assert config.to_dict()["model_type"] == "their_own" and config.auto_map == content["auto_map"]
    assert config.limit == float("inf") and config.width == 3
    broken = {"model_type": "gpt2", "id2label": {"zero": "a"}}
    with pytest.raises(CheckpointError, match=r"model_type='gpt2', written with transformers 9.9\) cannot be read"):
        restore_config(_manifest(config=broken, versions={"transformers": "9.9"}))


def test_code_that_a_checkpoint_names_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, ran = tmp_path / "base", tmp_path / "ran"
    base.mkdir()
    parts = {name: f"code.{name.removeprefix('Auto')}" for name in ("AutoConfig", "AutoModelForCausalLM")}
    (base / "config.json").write_text(json.dumps({"model_type": "their_own", "auto_map": parts}))
    (base / "code.py").write_text(f"from pathlib import Path\nPath({str(ran)!r}).touch()\n")
    (tmp_path / "named.py").write_text(f"from pathlib import Path\nPath({str(ran)!r}).touch()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"trust_remote_code": True}, r"base brings code of its own.*--trust-remote-code"),
        ({"factory": "named:build"}, "names both named:build and a directory"),
    )
    for model, says in refused:
        manifest = _manifest(versions={}, job={"model": {"path": str(base), **model}})
        with pytest.raises(CheckpointError, match=says):
            export.open_base(manifest, trust_remote_code=False)
        assert not ran.exists()
    trusted = _manifest(versions={}, job={"model": {"path": str(base), "trust_remote_code": True}})
    with pytest.raises(ModelError):  # its code has no config
        export.open_base(trusted, trust_remote_code=True)
    assert ran.exists()


def test_many_files_are_not_all_open(gpt2: Gpt2, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwise.checkpoint import whole
    from shardwise.checkpoint.catalog import find, read_manifest

    monkeypatch.setattr(whole, "OPEN_FILES", 1)
    store, name = find(str(gpt2[0]))
    with WholeTensors(store, name, read_manifest(store, name)) as tensors:
        for key, weight in gpt2[1].items():
            assert torch.equal(tensors.read(f"model/{key}"), weight)
            assert len(tensors._open) == 1
