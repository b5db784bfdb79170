"""Sharding on FSDP2: how often parameters travel."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.testing.world import WorldPool
from shardwise.training.setup import set_up
from shardwise.training.step import evaluate, train_step
from tests.parity.jobs import make_job

GATHER, SCATTER = torch.ops.c10d._allgather_base_, torch.ops.c10d._reduce_scatter_base_


class Counting(TorchDispatchMode):
    """How often each operator was called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket] += 1
        return func(*args, **(kwargs or {}))


def counts(directory: str, reshard: bool) -> tuple[int, int, int]:
    """(gathers of a step of two microbatches, its reduce-scatters, gathers of an evaluation that follows)."""
    parallel = {"device": "cpu", "reshard_after_forward": reshard}
    training = {"gradient_accumulation": 2, "microbatch_size": 1, "sequences_per_step": 2 * dist.get_world_size()}
    run = set_up(make_job(directory, "gpt2", layers=4, parallel=parallel, training=training), torch.device("cpu"))
    batches = [batch.to(torch.device("cpu")) for batch in run.stream.batches(0)]
    with Counting() as seen:
        train_step(run.model, run.objective, batches, run.optimizer, run.scaler, 0)
    with Counting() as after:
        evaluate(run.model, run.objective, [batches[:1]])
    return seen.calls[GATHER], seen.calls[SCATTER], after.calls[GATHER]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("reshard", "gathers"),
    [
        (True, 2 * (1 + 4 + 3)),  # the root, four blocks in forward; backward begins with the last, which is there
        (False, 2 * (1 + 4)),
    ],
)
def test_the_last_block_waits_for_its_backward(
    world_pool: WorldPool, corpora: Path, reshard: bool, gathers: int
) -> None:
    assert world_pool.run(2, counts, str(corpora), reshard) == [(gathers, 2 * (1 + 4), 1 + 4)] * 2


def one_shard_rank(directory: str, reshard: bool) -> tuple[int, int]:
    """(reductions, casts of a unit's weights) of a step of three microbatches where nothing is sharded."""
    casts, to_unsharded = [0], FSDPParamGroup._to_unsharded

    def cast(group: FSDPParamGroup) -> None:
        casts[0] += not group.is_unsharded
        to_unsharded(group)

    parallel = {"device": "cpu", "sharded_data_parallel_degree": 1, "reshard_after_forward": reshard}
    training = {"gradient_accumulation": 3, "microbatch_size": 1, "sequences_per_step": 3 * dist.get_world_size()}
    job = make_job(directory, "gpt2", layers=4, parallel=parallel, training=training, precision={"compute": "bf16"})
    run = set_up(job, torch.device("cpu"))
    batches = [batch.to(torch.device("cpu")) for batch in run.stream.batches(0)]
    with Counting() as seen, mock.patch.object(FSDPParamGroup, "_to_unsharded", cast):
        train_step(run.model, run.objective, batches, run.optimizer, run.scaler, 0)
    return seen.calls[torch.ops.fsdp.chunk_cat], casts[0]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("reshard", "casts"), [(True, 1 + 3 * (4 + 3)), (False, 1 + 4)])
def test_one_shard_rank_reduces_once_a_step(
    world_pool: WorldPool, corpora: Path, ranks: int, reshard: bool, casts: int
) -> None:
    assert world_pool.run(ranks, one_shard_rank, str(corpora), reshard) == [(1 + 4, casts)] * ranks
