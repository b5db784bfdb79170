"""Ranks that no launcher of ours has started hear of an error of one of them, under its number."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardwise.collectives import registration
from shardwise.errors import ShardwiseError, UserCodeError
from shardwise.launch import process_group as process_groups
from shardwise.launch.environment import detect
from shardwise.launch.process_group import process_group
from shardwise.testing.world import WorldPool

MISTAKE = "the forward of Net (net.py:3) raised ValueError: no sine"


def leave_pool(directory: str) -> dist.Store:
    """Leave the group of the pool; return the store of a new one."""
    dist.barrier()  # Gloo hangs on a rank that still connects when its peer closes
    dist.destroy_process_group()
    return dist.FileStore(f"{directory}/store", 2)


def own_group(backend: str, directory: str) -> str:
    """Let rank 1 fail in a group that is made and left by us; return what this rank raises."""
    place = detect()
    assert place is not None
    process_groups._stores[place] = leave_pool(directory)
    try:
        with pytest.raises(ShardwiseError) as caught, process_group("cpu", backend):
            fail_on_rank_one(place.rank)
    finally:
        del process_groups._stores[place]
    return f"{type(caught.value).__name__}: {caught.value}"


def fail_on_rank_one(rank: int) -> None:
    dist.all_reduce(torch.ones(1))
    if rank == 1:
        raise UserCodeError(MISTAKE)
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize("backend", ["gloo", "shardwise"])
def test_the_other_ranks_raise_the_error_of_the_first(world_pool: WorldPool, tmp_path: Path, backend: str) -> None:
    told, own = world_pool.run(2, own_group, backend, str(tmp_path))
    assert own == f"UserCodeError: {MISTAKE}"
    assert told == f"UserCodeError: rank 1: {MISTAKE}"


def users_group(directory: str, is_alone: bool) -> str:
    """Let rank 1, or all ranks, fail in a group of the user's, which stays; return what this rank raises."""
    store, rank = leave_pool(directory), int(os.environ["RANK"])
    registration.register()
    dist.init_process_group("shardwise", store=store, rank=rank, world_size=2)
    with pytest.raises(ShardwiseError) as caught, process_group("cpu", "shardwise"):
        if not is_alone:
            raise UserCodeError(MISTAKE)
        fail_on_rank_one(rank)
    if not is_alone:
        time.sleep(0.5 * rank)  # the other one waits in the barrier and looks around
        dist.barrier()
    return str(caught.value)


def test_in_a_group_of_the_users_too(world_pool: WorldPool, tmp_path: Path) -> None:
    assert world_pool.run(2, users_group, str(tmp_path), True) == [f"rank 1: {MISTAKE}", MISTAKE]


def test_a_refusal_on_all_ranks_leaves_the_group_as_it_is(world_pool: WorldPool, tmp_path: Path) -> None:
    assert world_pool.run(2, users_group, str(tmp_path), False) == [MISTAKE, MISTAKE]
