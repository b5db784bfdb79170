"""Scripts of 2021 and 2022 that bring their own 16 bits: halved model, masters, loss scale, and files of them."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwise.smp as smp
from shardwise.errors import CheckpointError
from shardwise.smp.safe_reading import read_safely
from shardwise.smp.v1.wait_registry import LEFT
from shardwise.testing.world import WorldPool
from tests.fork_server import run_python
from tests.smp.scripts import batches, make_model, train_step

SCRIPT = Path(__file__).with_name("own_fp16_script.py")
TWO = {"pipeline_parallel_degree": 2, "microbatches": 2}


def _train(options: dict[str, Any], workers: int, place: Path) -> tuple[Tensor, Tensor]:
    """[steps, 2] losses and norms of a run, and of its last steps once more from its files."""
    command = ["-m", "shardwise", "run", "--device", "cpu", "--workers", workers, "--model-dir", place]
    done = run_python(*command, SCRIPT, json.dumps(options))
    assert done.returncode == 0, done.stderr
    whole, rest = json.loads((place / "losses.json").read_text())
    return torch.tensor(whole), torch.tensor(rest)


@pytest.mark.slow
def test_masters_of_the_scripts_own_train_alike_on_every_layout_and_go_on(tmp_path: Path) -> None:
    whole, rest = _train({}, 1, tmp_path)
    assert whole[0, 1] == -1 and bool((whole[1:, 1] > 0).all())  # one overflow, then steps
    assert torch.equal(whole[-len(rest) :], rest)
    for options in (TWO, {"tensor_parallel_degree": 2, "prescaled_batch": True}, {"shard_optimizer_state": True}):
        other, again = _train(options, 2, tmp_path)
        torch.testing.assert_close(other, whole, rtol=2e-2, atol=0)
        assert torch.equal(other[-len(again) :], again)


def _shared_file(config: dict[str, Any]) -> list[float]:
    """Losses of a run that goes on from rank 0's files, beside those of one that does not stop."""

    def start() -> tuple[Any, Any]:
        smp.init(config | {"ddp": True})
        model: Any = smp.DistributedModel(make_model("gpt2", torch.float32))
        return model, smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=1e-2), static_loss_scale=8.0)

    def train(model: Any, optimizer: Any, ids: Tensor) -> float:
        optimizer.zero_grad()
        loss = float(train_step(model, ids).reduce_mean())
        optimizer.step()
        return loss

    try:
        model, optimizer = start()
        train(model, optimizer, batches()[0])
        box = [model.local_state_dict(), optimizer.local_state_dict()]
        weights, moments = smp.allgather(box, smp.CommGroup.RDP_GROUP)[0]  # one file for all that share parameters
        expected = [train(model, optimizer, ids) for ids in batches()[1:]]
        smp.state.reset()
        model, optimizer = start()
        model.load_state_dict(weights)
        optimizer.load_state_dict(moments)
        return [train(model, optimizer, ids) - loss for ids, loss in zip(batches()[1:], expected)]
    finally:
        smp.state.reset()


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"fp16": True}, {"bf16": True}])
def test_ranks_that_shard_the_state_alone_go_on_from_one_file(world_pool: WorldPool, more: dict[str, Any]) -> None:
    for errors in world_pool.run(2, _shared_file, {"shard_optimizer_state": True} | more):
        assert errors == [0.0, 0.0]


def _stages_with_shards(place: str) -> list[float]:
    smp.init(TWO | {"shard_optimizer_state": True, "ddp": True})
    try:
        model: Any = smp.DistributedModel(make_model("gpt2"))
        optimizer: Any = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=1e-2))

        losses = []
        for number in (0, 1, 1):
            if number and len(losses) == 2:
                smp.resume_from_checkpoint(place, "kept", partial=True)
            optimizer.zero_grad()
            losses.append(float(train_step(model, batches()[number]).reduce_mean()))
            optimizer.step()
            if not number:
                smp.save_checkpoint(place, "kept", partial=True, model=model, optimizer=optimizer)
        return losses
    finally:
        smp.state.reset()


def test_stages_with_sharded_state_have_files_of_their_own(world_pool: WorldPool, tmp_path: Path) -> None:
    for losses in world_pool.run(4, _stages_with_shards, str(tmp_path)):
        assert losses[1] == losses[2] != losses[0]
    assert len(list((tmp_path / "kept_partial").glob("optimizer_*.pt"))) == 4


def test_hooks_for_a_model_that_is_distributed_are_called_at_once() -> None:
    smp.init({})
    try:
        model: Any = smp.DistributedModel(make_model("gpt2"))
        called: list[str] = []
        model.register_post_partition_hook(lambda model, optimizer: called.append("before"))
        model(input_ids=batches()[0])
        model.register_post_partition_hook(lambda model, optimizer: called.append("after"))
        assert called == ["before", "after"]
    finally:
        smp.state.reset()


def test_a_peer_that_was_met_and_has_ended_since_is_no_mistake() -> None:
    smp.init({})
    try:
        waits = smp.state.waits
        waits.store.set(f"{waits.prefix}/1", json.dumps({"call": LEFT}))
        looks = iter([False, True, True])  # it comes, and ends, between this rank's look at the count and at its note
        waits._wait(lambda: next(looks), "smp.barrier", [1], "")
    finally:
        smp.state.reset()


THEIRS = """
called = []

class Scaler:
    def __init__(self, scale=1.0):
        called.append("made")
        self.scale = scale

    def __setstate__(self, values):
        called.append("filled")

class Asking:
    def __reduce__(self):
        return Scaler, (4.0,)
"""


def test_files_fill_objects_of_a_scripts_classes_and_call_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "their_scaler.py").write_text(THEIRS)
    monkeypatch.syspath_prepend(tmp_path)
    their = importlib.import_module("their_scaler")
    monkeypatch.setitem(sys.modules, "their_scaler", their)
    torch.save({"scaler": their.Scaler(8.0)}, tmp_path / "scaler.pt")
    torch.save([their.Asking()], tmp_path / "asking.pt")
    their.called.clear()
    with pytest.raises(CheckpointError, match=r"names their_scaler\.Scaler"):  # of no script that runs
        read_safely(tmp_path / "scaler.pt")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "train.py"), raising=False)
    found = read_safely(tmp_path / "scaler.pt")["scaler"]
    assert type(found) is their.Scaler and found.scale == 8.0
    assert not hasattr(read_safely(tmp_path / "asking.pt")[0], "scale")
    assert their.called == []


REMOTE = """
from transformers import PreTrainedConfig

class TheirConfig(PreTrainedConfig):
    model_type = "theirs"
    def __init__(self, width=1, **kwargs):
        self.width = width
        super().__init__(**kwargs)

class Other:
    pass
"""


def test_a_config_of_remote_code_is_read_where_the_script_has_loaded_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, kept = "transformers_modules.theirs.configuration", tmp_path / "kept.pt"
    file = tmp_path / "remote" / f"{name.replace('.', '/')}.py"
    file.parent.mkdir(parents=True)
    file.write_text(REMOTE)
    for package in (file.parent, file.parent.parent):  # else transformers' own, further down the path, comes first
        (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "remote")
    for part in ("transformers_modules", "transformers_modules.theirs", name):
        monkeypatch.delitem(sys.modules, part, raising=False)
    module = importlib.import_module(name)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "elsewhere" / "train.py"), raising=False)
    torch.save({"model_config": module.TheirConfig(width=3)}, kept)
    found = read_safely(kept)["model_config"]
    assert type(found) is module.TheirConfig and found.width == 3 and found.model_type == "theirs"
    torch.save(module.Other(), tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match=r"names transformers_modules\.theirs\.configuration\.Other"):
        read_safely(tmp_path / "other.pt")
    del sys.modules[name]
    with pytest.raises(CheckpointError, match="TheirConfig"):
        read_safely(kept)
