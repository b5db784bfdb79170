"""Checkpoints as scripts of version 2 write and read them by torch's functions, in groups of a part of the world."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed._shard.api import load_with_process_group
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedOptimStateDictConfig,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

import shardwise.smp.v2 as tsm
from shardwise.smp.safe_reading import load_for_scripts
from shardwise.smp.v2.utils.process_group_utils import get_global_ranks
from shardwise.testing.world import WorldPool
from tests.smp.scripts import batches
from tests.smp.sharded_scripts import make_model, wrap


def _start(config: dict[str, Any], flat: bool) -> tuple[Any, Any]:
    tsm.init(config)
    model = wrap(tsm.transform(make_model("llama")), use_orig_params=not flat)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def _train(model: Any, optimizer: Any, ids: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss = model(input_ids=ids.chunk(4)[dist.get_rank()], labels=ids.chunk(4)[dist.get_rank()])["loss"]
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def _whole() -> tuple[FullStateDictConfig, FullOptimStateDictConfig]:
    return FullStateDictConfig(), FullOptimStateDictConfig()


def _state(optimizer: Any) -> list[torch.Tensor]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = [optimizer.state.get(parameter, {}) for parameter in parameters]
    return [state[name].clone() for state in states for name in sorted(state)]


def _save(model: Any, optimizer: Any, directory: str, how: str) -> None:
    if how == "local":
        with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
            content = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(content, f"{directory}/{dist.get_rank()}.pt")
    elif how == "sharded":
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            content = {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer), "steps": 2}
        if tsm.state.ranker.get_rep_rank(dist.get_rank()) == 0:
            checkpoint.save_state_dict(
                content, checkpoint.FileSystemWriter(directory), process_group=model.process_group,
                coordinator_rank=min(get_global_ranks(model.process_group)),
            )  # fmt: skip
    else:
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, *_whole()):
            content = {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer)}
        if dist.get_rank() == 0:
            torch.save(content, f"{directory}/full.pt")
    dist.barrier()


def _load(model: Any, optimizer: Any, directory: str, how: str) -> None:
    load = load_for_scripts(torch.load)
    if how == "local":
        with load_with_process_group(model.process_group):
            content = load(f"{directory}/{dist.get_rank()}.pt")
        with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
            model.load_state_dict(content["model"])
            optimizer.load_state_dict(content["optimizer"])
    elif how == "sharded":
        offloaded = ShardedOptimStateDictConfig(offload_to_cpu=True)
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, optim_state_dict_config=offloaded):
            content = {"model": model.state_dict(), "steps": 0}
            checkpoint.load_state_dict(
                content, checkpoint.FileSystemReader(directory), process_group=model.process_group,
                coordinator_rank=min(get_global_ranks(model.process_group)),
            )  # fmt: skip
            assert content["steps"] == 2
            model.load_state_dict(content["model"])
            found = checkpoint.optimizer.load_sharded_optimizer_state_dict(
                model_state_dict=content["model"], optimizer_key="optimizer",
                storage_reader=checkpoint.FileSystemReader(directory), process_group=model.process_group,
            )  # fmt: skip
            # In the order of torch 2.0, as scripts of SMP 2.0 have it.
            optimizer.load_state_dict(FSDP.optim_state_dict_to_load(found["optimizer"], model, optimizer))
    else:
        content = load(f"{directory}/full.pt")
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, *_whole()):
            model.load_state_dict(content["model"])
            optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, content["optimizer"]))


def _go_on(directory: str, how: str, degree: int, flat: bool = False) -> tuple[float, float]:
    first, second, third = batches()
    config = {"hybrid_shard_degree": degree, "sm_activation_offloading": False}
    try:
        model, optimizer = _start(config, flat)
        _train(model, optimizer, first)
        _train(model, optimizer, second)
        _save(model, optimizer, directory, how)
        before = _state(optimizer)
        straight = _train(model, optimizer, third)
        model, optimizer = _start(config, flat)
        _train(model, optimizer, first)
        _load(model, optimizer, directory, how)
        after = _state(optimizer)
        assert len(before) == len(after) and all(torch.equal(old, new) for old, new in zip(before, after))
        return straight, _train(model, optimizer, third)
    finally:
        tsm.state.reset()


@pytest.mark.parametrize(
    "how, flat",
    [
        ("sharded", False),
        pytest.param("sharded", True, marks=pytest.mark.slow),
        pytest.param("local", False, marks=pytest.mark.slow),
        ("local", True),
        ("full", False),
    ],
)
def test_groups_of_two_of_four_ranks_go_on_with_equal_state(
    world_pool: WorldPool, tmp_path: Path, how: str, flat: bool
) -> None:
    for straight, resumed in world_pool.run(4, _go_on, str(tmp_path), how, 2, flat):
        assert straight == resumed
    assert os.listdir(tmp_path)


def _copies(directory: str, how: str) -> tuple[float, float, int]:
    """As `_go_on`, and how many ranks are in the group that scripts save by."""
    straight, resumed = _go_on(directory, how, 1)
    try:
        model, _ = _start({"hybrid_shard_degree": 1, "sm_activation_offloading": False}, flat=False)
        return straight, resumed, dist.get_world_size(model.process_group)
    finally:
        tsm.state.reset()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["sharded", pytest.param("local", marks=pytest.mark.slow)])
def test_whole_copies_are_saved_by_the_first_alone(world_pool: WorldPool, tmp_path: Path, how: str) -> None:
    """Nobody waits for the other replicas: they are not in the group of the shard."""
    for straight, resumed, members in world_pool.run(4, _copies, str(tmp_path), how):
        assert straight == resumed and members == 1
