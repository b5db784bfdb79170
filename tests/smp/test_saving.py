"""Checkpoints of SMP: written, read back and gone on with, under their documented names."""

from __future__ import annotations

import argparse
import collections
import enum
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import shardwise.smp as smp
from shardwise.errors import CheckpointError, ConfigError
from shardwise.smp.exceptions import StepUsageError
from shardwise.smp.safe_reading import read_safely
from shardwise.smp.v1.sharded_data_parallel_checkpoint import (
    get_full_state_dict_from_sharded_data_parallel_checkpoint,
)
from shardwise.testing.world import WorldPool
from tests.smp.scripts import batches, make_model


def _start(config: dict[str, Any], dropout: float = 0.0) -> tuple[Any, Any, Any]:
    smp.init(config)
    made = make_model("gpt2")
    for part in made.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = dropout
    model = smp.DistributedModel(made)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

    @smp.step
    def step(model: Any, ids: Tensor) -> Tensor:
        loss: Tensor = model(input_ids=ids, labels=ids)["loss"]
        model.backward(loss)
        return loss

    def train(ids: Tensor) -> float:
        optimizer.zero_grad()
        mine = ids.chunk(smp.rdp_size())[smp.rdp_rank()]
        loss = float(step(model, mine).reduce_mean())
        optimizer.step()
        return loss

    return model, optimizer, train


def _go_on(directory: str, config: dict[str, Any]) -> tuple[list[float], list[float], list[str], Any]:
    first, second, third = batches()
    try:
        model, optimizer, train = _start(config, dropout=0.1)
        train(first), train(second)
        content = {"step": 2, "config": model.config, "count": np.prod((2, 3)), "args": argparse.Namespace(lr=1.0)}
        content["sums"] = collections.defaultdict(dict, first={"lost": 1})
        smp.save_checkpoint(directory, tag="two", model=model, optimizer=optimizer, user_content=content)
        named = dict(model.module.named_parameters())
        for parameter in (one for group in optimizer.fp16_groups for one in group):
            assert any(parameter is one for one in named.values()) and parameter.ds_shape.numel() == parameter.ds_numel
        smp.save(optimizer.local_state_dict(gather_if_shard=False), f"{directory}/state.pt", v3=True)
        weights, state = model.state_dict(), optimizer.state_dict()
        straight = [train(third)]
        model, optimizer, train = _start(config, dropout=0.1)
        content = smp.resume_from_checkpoint(directory)
        resumed = [train(third)]
        model, optimizer, train = _start(config, dropout=0.1)
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        smp.state.step_count = 2  # by which dropout goes on, and which these do not hold
        resumed.append(train(third))
        return straight * 2, resumed, sorted(path.name for path in Path(directory).rglob("*")), content
    finally:
        smp.state.reset()


@pytest.mark.parametrize(
    "config, names",
    [
        ({"pipeline_parallel_degree": 2, "microbatches": 2}, {"model_0_0.pt", "model_1_0.pt", "optimizer_1_0.pt"}),
        ({"sharded_data_parallel_degree": 2, "ddp": True}, {"model_0.pt", "optimizer_0.pt", "optimizer_1.pt"}),
    ],
)
def test_training_goes_on_as_if_it_had_not_stopped(
    world_pool: WorldPool, tmp_path: Path, config: dict[str, Any], names: set[str]
) -> None:
    for straight, resumed, files, content in world_pool.run(2, _go_on, str(tmp_path), config):
        assert resumed == pytest.approx(straight, rel=1e-6)
        assert names | {"newest", "two_partial", "user_content.pt"} <= set(files)
        assert content["sums"] == {"first": {"lost": 1}}
        assert (content["step"], content["count"], content["config"].n_embd, content["args"].lr) == (2, 6, 24, 1.0)
    _check_foreign(tmp_path)
    assert (tmp_path / "newest").read_text() == "two_partial"
    if "optimizer_0.pt" in names:
        shards = [torch.load(tmp_path / "two_partial" / f"optimizer_{index}.pt") for index in range(2)]
        assert shards[0]["partition_count"] == 2
        total = sum(-(-p.numel() // 2) for p in make_model("gpt2").parameters())
        assert all(len(shard["fp32_flat_groups"][0]) == total for shard in shards)


def _check_foreign(directory: Path) -> None:
    """Without the file of this library's own the same parts are read as Amazon's, into one process."""
    folder = directory / "two_partial"
    (folder / "partition.pt").rename(directory / "kept")
    try:
        smp.init({})
        model = smp.DistributedModel(make_model("gpt2"))
        before = {name: value.clone() for name, value in model.state_dict().items()}
        assert smp.resume_from_checkpoint(directory)["step"] == 2
        assert any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())
        if (folder / "model_0.pt").is_file():
            for name, value in torch.load(folder / "model_0.pt")["module"].items():
                torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-6, atol=1e-6)
            (folder / "optimizer_1.pt").rename(directory / "optimizer_1.pt")
            with pytest.raises(CheckpointError, match="of 2 shards and has 1"):
                smp.resume_from_checkpoint(directory)
            (directory / "optimizer_1.pt").rename(folder / "optimizer_1.pt")
        else:
            (folder / "model_0_0.pt").rename(folder / "model_0_1.pt")
            with pytest.raises(CheckpointError, match="parts of split tensors"):
                smp.resume_from_checkpoint(directory)
    finally:
        smp.state.reset()


def _full(directory: str) -> float:
    try:
        model, optimizer, train = _start({"ddp": True, "tensor_parallel_degree": 2, "prescaled_batch": True})
        train(batches()[0])
        smp.save_checkpoint(directory, tag="all", partial=False, model=model, optimizer=optimizer)
        expected = train(batches()[1])
        model, optimizer, train = _start({"ddp": True, "pipeline_parallel_degree": 2})
        assert smp.resume_from_checkpoint(directory, tag="all", partial=False) == {}
        smp.save_checkpoint(directory, tag="more", partial=False, user_content=[1, 2])
        assert smp.resume_from_checkpoint(directory, partial=False) == [1, 2]  # as it was given
        return abs(train(batches()[1]) - expected)
    finally:
        smp.state.reset()


def test_full_checkpoint_fits_another_layout(world_pool: WorldPool, tmp_path: Path) -> None:
    assert max(world_pool.run(2, _full, str(tmp_path))) < 1e-6


def _mistakes(directory: str) -> list[str]:
    said = []
    try:
        model, optimizer, train = _start({"ddp": True})
        train(batches()[0])
        smp.save_checkpoint(directory, tag="one", model=model, optimizer=optimizer)
        (Path(directory) / "evil.pt").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
        _start({"ddp": True, "pipeline_parallel_degree": 2})
        for call in (
            lambda: smp.resume_from_checkpoint(directory),
            lambda: smp.resume_from_checkpoint(directory, tag="two"),
            lambda: smp.load(f"{directory}/none.pt"),
            lambda: smp.load(f"{directory}/evil.pt", partial=False),
            lambda: smp.resume_from_checkpoint(directory, partial=False),
        ):
            try:
                call()
            except CheckpointError as error:
                said.append(str(error))
        return said
    finally:
        smp.state.reset()


def test_wrong_checkpoints_are_refused_with_their_names(world_pool: WorldPool, tmp_path: Path) -> None:
    for said in world_pool.run(2, _mistakes, str(tmp_path)):
        degrees, missing, none, evil, of_parts = said
        assert "one_partial is a partial checkpoint; pass partial=True" in of_parts
        assert "pipeline 1 there and 2 here" in degrees and "two_partial is not there" in missing
        assert "none.pt_" in none and "evil.pt cannot be read" in evil


def _without_state(directory: str, config: dict[str, Any]) -> list[list[float]]:
    """Losses behind the same checkpoint: with all of it, without sharded state, and without an optimizer's."""
    first, *rest = batches()
    losses = []
    try:
        model, optimizer, train = _start(config)
        train(first)
        smp.save_checkpoint(directory, tag="one", model=model, optimizer=optimizer)
        for left_out in ({}, {"load_sharded_optimizer_state": False}, {"load_optimizer": False}):
            model, optimizer, train = _start(config)
            smp.resume_from_checkpoint(directory, **left_out)
            losses.append([train(ids) for ids in rest])
        return losses
    finally:
        smp.state.reset()


def test_sharded_state_can_be_left_out(world_pool: WorldPool, tmp_path: Path) -> None:
    sharded = {"sharded_data_parallel_degree": 2, "ddp": True}
    for whole, without_sharded, without_any in world_pool.run(2, _without_state, str(tmp_path / "sharded"), sharded):
        assert whole[0] == without_any[0] and whole[1] != without_any[1]
        assert without_sharded == without_any
    for whole, without_sharded, without_any in world_pool.run(1, _without_state, str(tmp_path / "whole"), {}):
        assert without_sharded == whole and whole[1] != without_any[1]


def _groups(directory: str) -> tuple[dict[str, Tensor], dict[str, Tensor], str, list[str]]:
    """Save a sharded model of two groups; its weights, those put together from the files, and later refusals."""
    try:
        smp.init({"ddp": True, "sharded_data_parallel_degree": 2})
        model = smp.DistributedModel(make_model("gpt2"))
        plain = [parameter for parameter in model.parameters() if parameter.dim() < 2]
        decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
        optimizer = smp.DistributedOptimizer(torch.optim.AdamW(groups, lr=1e-2))

        @smp.step
        def step(model: Any, ids: Tensor) -> None:
            model.backward(model(input_ids=ids, labels=ids)["loss"])

        step(model, batches()[0].chunk(2)[smp.rdp_rank()])
        optimizer.step()
        for tag in ("best", "one", "best", "two"):
            smp.save_checkpoint(directory, tag, True, model, optimizer, num_kept_partial_checkpoints=2)
        weights = model.state_dict()
        kept = sorted(path.name for path in Path(directory).glob("*_partial"))
        put_together = get_full_state_dict_from_sharded_data_parallel_checkpoint(directory)
        smp.state.reset()
        smp.init({"ddp": True, "sharded_data_parallel_degree": 2})
        model = smp.DistributedModel(make_model("gpt2"))
        smp.resume_from_checkpoint(directory)
        with pytest.raises(StepUsageError) as refused:
            model.state_dict()
        return weights, put_together, str(refused.value), kept
    finally:
        smp.state.reset()


def test_shards_of_two_groups_make_the_weights_and_wait_for_a_step(world_pool: WorldPool, tmp_path: Path) -> None:
    weights, put_together, refusal, kept = world_pool.run(2, _groups, str(tmp_path))[0]
    assert put_together and all(torch.equal(value, weights[name].float()) for name, value in put_together.items())
    assert "take their places at the first step; run one first" in refusal
    assert kept == ["best_partial", "two_partial"]  # written again behind the other


class Mode(enum.Enum):
    """One of a script's own classes."""

    FAST = "fast"


def test_members_of_a_scripts_enum_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)
    torch.save({"args": argparse.Namespace(mode=Mode.FAST)}, tmp_path / "content.pt")
    assert read_safely(tmp_path / "content.pt")["args"].mode is Mode.FAST


class Scaled:
    """An optimizer of a script's own: masters made behind the first step, and a scale that it keeps."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.scale, self.models = optimizer, 8.0, []

    def make_masters(self) -> None:
        for group in self.optimizer.param_groups:
            self.models += group["params"]
            group["params"] = [torch.nn.Parameter(one.detach().clone()) for one in group["params"]]

    def zero_grad(self) -> None:
        for one in self.models:
            one.grad = None

    def step(self) -> None:
        masters = [one for group in self.optimizer.param_groups for one in group["params"]]
        for one, master in zip(self.models, masters, strict=True):
            master.grad = one.grad / self.scale
        self.optimizer.step()
        for one, master in zip(self.models, masters, strict=True):
            one.data.copy_(master.data)
        self.scale *= 2

    def state_dict(self) -> Any:
        return {"own": self.optimizer.state_dict(), "scale": self.scale}

    def load_state_dict(self, saved: Any) -> None:
        self.optimizer.load_state_dict(saved["own"])
        self.scale = saved["scale"]


def _own(directory: str, config: dict[str, Any]) -> tuple[list[float], list[float], float]:
    """Losses of the later steps, those of a run that goes on from a checkpoint, and the scale that it starts from."""

    @smp.step
    def step(model: Any, optimizer: Any, ids: Tensor) -> Tensor:
        loss: Tensor = model(input_ids=ids, labels=ids)["loss"]
        model.backward(loss * optimizer.scale)
        return loss

    def start() -> tuple[Any, Any]:
        smp.init(config)
        model: Any = smp.DistributedModel(make_model("gpt2"))
        optimizer: Any = smp.DistributedOptimizer(Scaled(torch.optim.AdamW(model.parameters(), lr=1e-2)))
        model.register_post_step_hook(lambda model, optimizer: optimizer.make_masters())
        return model, optimizer

    def train(model: Any, optimizer: Any, ids: Tensor) -> float:
        optimizer.zero_grad()
        loss = float(step(model, optimizer, ids.chunk(smp.rdp_size())[smp.rdp_rank()]).reduce_mean())
        optimizer.step()
        return loss

    try:
        model, optimizer = start()
        train(model, optimizer, batches()[0])
        smp.save_checkpoint(directory, "one", model=model, optimizer=optimizer)
        straight = [train(model, optimizer, ids) for ids in batches()[1:]]
        smp.state.reset()
        model, optimizer = start()
        optimizer.scale = 16.0  # a script reads it in its step function, before the rest is loaded
        smp.resume_from_checkpoint(directory)
        resumed = [train(model, optimizer, ids) for ids in batches()[1:]]
        return straight, resumed, optimizer.scale
    finally:
        smp.state.reset()


@pytest.mark.parametrize(
    "config",
    [
        {"pipeline_parallel_degree": 2, "microbatches": 2},
        {"ddp": True, "sharded_data_parallel_degree": 2, "sdp_gradient_clipping": 0.0},
    ],
)
def test_an_optimizer_of_the_scripts_own_goes_on_with_what_it_keeps(
    world_pool: WorldPool, tmp_path: Path, config: dict[str, Any]
) -> None:
    for straight, resumed, scale in world_pool.run(2, _own, str(tmp_path), config):
        assert resumed == straight and scale == 64.0


def test_an_optimizer_that_is_not_distributed_is_not_forgotten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        model, optimizer, train = _start({})
        train(batches()[0])
        smp.save_checkpoint(tmp_path, "one", model=model, optimizer=optimizer)
        smp.state.reset()
        smp.init({})
        other: Any = smp.DistributedModel(make_model("gpt2"))
        plain = torch.optim.AdamW(other.parameters())
        smp.resume_from_checkpoint(tmp_path)
        assert "has made no smp.DistributedOptimizer yet" in capsys.readouterr().err
        smp.resume_from_checkpoint(tmp_path, load_optimizer=False)
        assert "DistributedOptimizer" not in capsys.readouterr().err
        with pytest.raises(CheckpointError, match="got AdamW, of which no smp"):
            smp.save_checkpoint(tmp_path, "two", model=other, optimizer=plain)
    finally:
        smp.state.reset()


def _own_mistakes(directory: str) -> list[str]:
    class Bare:
        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer

        def step(self) -> None:
            self.optimizer.step()

    said = []
    try:
        for config in ({}, {"ddp": True, "sharded_data_parallel_degree": 2}):
            smp.init(config)
            model: Any = smp.DistributedModel(make_model("gpt2"))
            try:
                optimizer: Any = smp.DistributedOptimizer(Bare(torch.optim.AdamW(model.parameters(), lr=1e-2)))
                model(input_ids=batches()[0])
                smp.save_checkpoint(directory, "one", model=model, optimizer=optimizer)
            except (CheckpointError, ConfigError) as error:
                said.append(str(error))
            smp.state.reset()
        return said
    finally:
        smp.state.reset()


def test_an_optimizer_of_the_scripts_own_is_refused_where_state_or_clipping_would_be_lost(
    world_pool: WorldPool, tmp_path: Path
) -> None:
    for keeps_nothing, clips in world_pool.run(2, _own_mistakes, str(tmp_path)):
        assert "Bare has no state_dict" in keeps_nothing
        assert "sdp_gradient_clipping 1.0 clips in the step of a torch optimizer, and Bare" in clips
