"""FSDP2 that computes while its parameters and gradients travel: the same bits as FSDP2 that waits."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from shardwise._torch_compat.groups import clear_placement_cache
from shardwise.collectives import fsdp, registration
from shardwise.collectives.topology import HOST_VARIABLE
from shardwise.commands.verify import verify_rank
from shardwise.parallel.transforms import sharding as sharded_data
from shardwise.testing.world import WorldPool
from tests.parity.jobs import make_job


def sharded(mesh: DeviceMesh, mixed: MixedPrecisionPolicy) -> nn.Sequential:
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24)) for _ in range(3)))
    for block in model:
        fully_shard(block, mesh=mesh, mp_policy=mixed)
    fully_shard(model, mesh=mesh, mp_policy=mixed)
    blocks = [block for block in model if isinstance(block, FSDPModule)]
    for block, following in itertools.pairwise(blocks):
        block.set_modules_to_forward_prefetch([following])
    return model


def trained(model: nn.Module, late: list[int]) -> list[Tensor]:
    """Parameters after steps of one, two and one microbatches; `late` gets how many gradients came late in each."""
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), len(late)
    queue, calls = fsdp.at_end_of_backward, list[Callable[[], object]]()
    fsdp.at_end_of_backward = lambda call: (calls.append(call), queue(call))[1]  # type: ignore[assignment]
    try:
        for microbatches in (1, 2, 1):
            for number in range(microbatches):
                torch.manual_seed(10 * number + dist.get_rank())
                model(torch.randn(5, 24)).square().mean().backward()
            late.append(len(calls) - sum(late[seen:]))
            optimizer.step()
            optimizer.zero_grad()
    finally:
        fsdp.at_end_of_backward = queue
    return [parameter.full_tensor() for parameter in model.parameters()]  # type: ignore[attr-defined]


def both_ways(mixed: MixedPrecisionPolicy) -> list[int]:
    registration.register()
    clear_placement_cache()
    group = dist.new_group(backend=registration.BACKEND)
    mesh = DeviceMesh.from_group(group, "cpu")
    waiting, overlapped, late = sharded(mesh, mixed), sharded(mesh, mixed), list[int]()
    fsdp.overlap([module for module in overlapped.modules() if isinstance(module, FSDPModule)])
    for plain, ours in zip(trained(waiting, []), trained(overlapped, late), strict=True):
        assert torch.equal(plain, ours)
    dist.destroy_process_group(group)
    return late


@pytest.mark.parametrize(
    ("mixed", "late"),
    [
        (MixedPrecisionPolicy(), [3, 3, 3]),  # of a second microbatch, none
        (MixedPrecisionPolicy(torch.bfloat16, torch.float32), [3, 3, 3]),
        (MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16), [0, 0, 0]),  # converted at once
    ],
)
def test_gradients_that_come_late_are_the_same(
    world_pool: WorldPool, mixed: MixedPrecisionPolicy, late: list[int]
) -> None:
    assert world_pool.run(2, both_ways, mixed) == [late] * 2


def verified(directory: str) -> tuple[bool, int]:
    """A job over two hosts of one rank: whether it agrees with one process, and how many modules overlap."""
    rank, world, asked = dist.get_rank(), dist.group.WORLD, list[int]()
    assert world is not None
    os.environ |= {HOST_VARIABLE: "ab"[rank], "LOCAL_WORLD_SIZE": "1"}
    store = dist.PrefixStore("overlap", world.get_group_store())
    dist.destroy_process_group()
    registration.register()
    dist.init_process_group(registration.BACKEND, store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    plain = sharded_data.overlap

    def counted(modules: Sequence[FSDPModule]) -> None:
        asked.append(len(modules))
        plain(modules)

    sharded_data.overlap = counted
    try:
        report = verify_rank(make_job(directory, "gpt2"), torch.device("cpu"), steps=2)
        dist.barrier()
    finally:
        sharded_data.overlap = plain
    return report is None or bool(report.agrees), max(asked, default=0)


@pytest.mark.slow
def test_a_job_on_two_hosts_agrees_with_one_process(world_pool: WorldPool, corpora: Path) -> None:
    for agrees, modules in world_pool.run(2, verified, str(corpora)):
        assert agrees and modules > 1
