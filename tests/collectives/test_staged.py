"""Tensors of a device, which go through the host's memory: on a device whose streams do nothing until they are waited
for (`lazy_device.cpp`), so that an order that is wrong gives wrong numbers every time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from shardwise._torch_compat.groups import all_gather_single, reduce_scatter_single
from shardwise.collectives import registration
from shardwise.testing.world import WorldPool
from tests.collectives import lazy_device
from tests.collectives.test_engine import ddp, fit, fsdp2, fuzz, messages, model, on_backend, special_cases

STAGED = "cpu:shardwise,lazy:shardwise"


@pytest.fixture(scope="module")
def device_pool() -> Iterator[WorldPool]:
    """Workers of their own: one that has the device keeps it."""
    lazy_device.build()
    with WorldPool() as pool:
        yield pool


def on_device(function: Callable[..., Any], *arguments: Any) -> Any:
    """`function` on this rank, with new tensors on the device."""
    torch.set_default_device(lazy_device.use())
    registration.register()
    try:
        return function(*arguments, backend=STAGED)
    finally:
        torch.set_default_device("cpu")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("world", [2, 4])
def test_random_operations_over_random_groups(device_pool: WorldPool, world: int) -> None:
    assert device_pool.run(world, on_device, fuzz, 20261122, 60) == [60] * world


def test_reductions_layouts_coalescing_futures_objects(device_pool: WorldPool) -> None:
    device_pool.run(2, on_device, special_cases)


def test_messages(device_pool: WorldPool) -> None:
    device_pool.run(3, on_device, messages)


# --- the order


def pending_copy(data: Tensor) -> Tensor:
    """A tensor that holds `data` once its stream gets there; before that other bytes."""
    return torch.empty_like(data, device=lazy_device.NAME).copy_(data.pin_memory(lazy_device.NAME), non_blocking=True)


def pending(*shape: int, value: float) -> Tensor:
    return pending_copy(torch.full(shape, value, device="cpu"))


def an_eighth(future: torch.futures.Future[list[Tensor]]) -> Tensor:
    """Queued on the stream of the callback, not computed yet."""
    return pending_copy(future.value()[0].cpu() / 8)


def orders(backend: str) -> None:
    group, rank = dist.new_group(backend=backend), dist.get_rank()
    side = torch.lazy.Stream()
    with torch.lazy.stream(side):  # the input is of the stream of the call, which is not the default one
        given, made = pending(1000, value=rank + 1.0), pending(2000, value=-1.0)
        work = all_gather_single(made, given, group=group, async_op=True)
        given.fill_(9.0)  # queued behind the copy to the host
    work.wait()
    assert made.tolist() == [1.0] * 1000 + [2.0] * 1000
    torch.lazy.synchronize()  # what was queued for the output before the call does not come over it
    assert made.tolist() == [1.0] * 1000 + [2.0] * 1000
    with torch.lazy.stream(side):
        given = pending(1000, value=1.0)
        dist.all_reduce(given, group=group)
        event = side.record_event()  # as FSDP2 does
    torch.lazy.current_stream().wait_event(event)
    assert given.tolist() == [2.0] * 1000
    future = dist.all_reduce(pending(3, value=4.0), group=group, async_op=True).get_future()
    with torch.lazy.stream(side):  # which waits for the stream of the callback
        assert future.then(an_eighth).wait().tolist() == [1.0] * 3
    if rank == 0:
        dist.send(pending(70_000, value=5.0), 1, group)
    else:
        dist.recv(received := pending(70_000, value=-1.0), 0, group)
        torch.lazy.synchronize()
        assert received.unique().tolist() == [5.0]
    dist.barrier(group)
    weight = nn.Parameter(pending(6, value=float(rank)))
    version = weight._version
    dist.broadcast(weight, 1, group)
    assert weight.tolist() == [1.0] * 6
    assert weight.is_leaf and weight._version == version  # autograd hears nothing of it, as of a CPU's


def test_copies_keep_the_order_of_the_streams(device_pool: WorldPool) -> None:
    device_pool.run(2, on_device, orders)


def layouts(backend: str) -> None:
    """Elements that do not lie one after the other; tensors of both devices in one call."""
    group, rank = dist.new_group(backend=backend), dist.get_rank()
    strided = (torch.arange(12.0) + rank).view(3, 4).T
    made = torch.zeros(8, 6)[::2, ::2][:, :3].unsqueeze(0).expand(1, 4, 3).squeeze(0)
    wholes = [torch.zeros(4, 3).T.contiguous().T for _ in range(2)]
    dist.all_gather(wholes, strided, group)
    assert all(torch.equal(each, (torch.arange(12.0) + rank).view(3, 4).T) for rank, each in enumerate(wholes))
    reduce_scatter_single(piece := torch.empty(2, 3), (torch.arange(12.0)).view(3, 4).T.contiguous(), group=group)
    assert torch.equal(piece, 2 * torch.arange(12.0).view(3, 4).T[2 * rank : 2 * rank + 2])
    dist.all_reduce(made.fill_(1.0), group=group)
    assert made.tolist() == [[2.0] * 3] * 4
    both = [torch.full((2,), float(rank), device=device) for device in ("cpu", lazy_device.NAME)]
    dist.all_to_all([found := torch.empty(2, device="cpu"), torch.empty(2)], both, group)
    assert found.tolist() == [0.0, 0.0]


def test_strided_tensors_and_tensors_of_both_devices(device_pool: WorldPool) -> None:
    device_pool.run(2, on_device, layouts)


# --- programs that know nothing of it


def hybrid() -> list[Tensor]:
    """FSDP2 over two shard ranks and two replicas, whose all-reduce has a stream of its own."""
    mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("replica", "shard"))
    module = model()
    for layer in module:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    module[0].unshard(async_op=True)  # waited for when its forward needs it
    fit(module)
    return [p.full_tensor().detach().clone() for p in module.parameters()]


def stages() -> list[Tensor]:
    """A pipeline of two stages: send and receive, both ways."""
    rank, whole = dist.get_rank(), model()
    part = whole[:2] if rank == 0 else whole[2:]
    stage = PipelineStage(part, rank, 2, torch.get_default_device())
    schedule = Schedule1F1B(stage, 4, loss_fn=lambda output, target: (output - target).square().mean())
    data = torch.arange(16.0 * 64).view(16, 64).sin()
    losses: list[Tensor] = []
    schedule.step(*([data] if rank == 0 else []), **({} if rank == 0 else {"target": data.cos(), "losses": losses}))
    return [p.grad for p in part.parameters() if p.grad is not None] + losses


def redistributed() -> list[Tensor]:
    """DTensor: every change of placement, which are all-gather, all-to-all, reduce-scatter and all-reduce."""
    mesh = init_device_mesh(torch.get_default_device().type, (2,))
    rows = distribute_tensor(torch.arange(24.0).view(4, 6), mesh, [Shard(0)])
    columns = rows.redistribute(placements=[Shard(1)])
    parts = DTensor.from_local(torch.ones(4, 6) * (dist.get_rank() + 1), mesh, [Partial()])
    return [
        columns.to_local(),
        columns.full_tensor(),
        parts.redistribute(placements=[Shard(0)]).to_local(),
        parts.full_tensor(),
    ]


def trained(train: Callable[[], list[Tensor]], directory: str, backend: str) -> list[Tensor]:
    return [each.cpu() for each in on_backend(backend, directory, train)]


def on_cpu(train: Callable[[], list[Tensor]], directory: str) -> list[Tensor]:
    registration.register()
    return on_backend("shardwise", directory, train)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("train", "world"), [(ddp, 2), (fsdp2, 2), (hybrid, 4), (stages, 2), (redistributed, 2)])
def test_plain_pytorch_computes_as_on_the_cpu(
    device_pool: WorldPool, world_pool: WorldPool, train: Callable[[], list[Tensor]], world: int, tmp_path: Path
) -> None:
    ours = device_pool.run(world, on_device, trained, train, str(tmp_path))
    right = world_pool.run(world, on_cpu, train, str(tmp_path))
    differences = [(a - b).abs().max().item() for mine, its in zip(ours, right) for a, b in zip(mine, its, strict=True)]
    assert len(differences) >= 2 * 4 and max(differences) < 1e-6  # the products' operands lie otherwise in memory
