"""What torch asks of a backend: every form and kind of tensor is right, or refused in words."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.nn.parallel import DistributedDataParallel

from shardwise._torch_compat.groups import reduce_scatter_single
from shardwise.collectives import engine, registration
from shardwise.testing.world import WorldPool


def engine_group(seconds: float = 30) -> Any:
    registration.register()
    return dist.new_group(backend="shardwise", timeout=timedelta(seconds=seconds))


# --- kinds of tensors


def sparse_sums() -> tuple[Tensor, Tensor, str]:
    group, rank = engine_group(), dist.get_rank()
    rows = torch.sparse_coo_tensor([[0, rank + 1, 0]], [[1.0, 1.0], [2.0, 2.0], [1.0, 1.0]], (4, 2))
    dist.all_reduce(rows, group=group)
    empty = torch.sparse_coo_tensor([[2]] if rank else [[]], [4.0] if rank else [], (3,))
    dist.all_reduce(empty, dist.ReduceOp.AVG, group)
    with pytest.raises(TypeError, match="sparse tensors can be summed and averaged, nothing else"):
        dist.all_reduce(rows, dist.ReduceOp.MAX, group)
    with pytest.raises(RuntimeError, match="SparseCPU"):  # torch refuses what Gloo has not either
        dist.broadcast(rows, 0, group)
    other = torch.sparse_coo_tensor([[0]], [1.0], (2 + rank,))
    with pytest.raises(RuntimeError, match="sparse tensors of different shapes") as caught:
        dist.all_reduce(other, group=group)
    return rows.to_dense(), empty.to_dense(), str(caught.value)


def test_sparse_tensors_are_summed(world_pool: WorldPool) -> None:
    for rows, averages, told in world_pool.run(2, sparse_sums):
        assert rows.tolist() == [[4.0, 4.0], [2.0, 2.0], [2.0, 2.0], [0.0, 0.0]]
        assert averages.tolist() == [0.0, 0.0, 2.0]
        assert "rank " in told


def sparse_gradient() -> list[list[float]]:
    group = engine_group()
    module = DistributedDataParallel(nn.Embedding(3, 2, sparse=True), process_group=group)
    module(torch.tensor([dist.get_rank()])).sum().backward()
    return module.module.weight.grad.to_dense().tolist()


def test_ddp_averages_sparse_gradients(world_pool: WorldPool) -> None:
    assert world_pool.run(2, sparse_gradient) == [[[0.5, 0.5], [0.5, 0.5], [0.0, 0.0]]] * 2


def complex_sums() -> list[complex]:
    group, rank = engine_group(), dist.get_rank()
    whole = torch.tensor([1 + 2j, 3.0], dtype=torch.complex64) * (rank + 1)
    part, uneven = torch.zeros(1, dtype=torch.complex64), torch.zeros(rank + 1, dtype=torch.complex128)
    reduce_scatter_single(part, whole, group=group)
    dist.reduce_scatter(uneven, [torch.full((size,), 1j, dtype=torch.complex128) for size in (1, 2)], group=group)
    total = whole.clone()
    dist.all_reduce(total, dist.ReduceOp.AVG, group)
    shown = torch._neg_view(torch.tensor([1.0, 2.0]))  # its memory holds other numbers
    group._get_backend(torch.device("cpu")).allreduce([shown]).wait()  # by itself: torch would hand it a copy
    with pytest.raises(TypeError, match="complex numbers can be summed and averaged, nothing else"):
        reduce_scatter_single(part, whole, dist.ReduceOp.MAX, group)
    return [*part.tolist(), *uneven.tolist(), *total.tolist(), *shown.tolist()]


def test_complex_numbers_are_summed_and_views_that_negate_are_what_they_show(world_pool: WorldPool) -> None:
    first, second = world_pool.run(2, complex_sums)
    assert first == [3 + 6j, 2j, 1.5 + 3j, 4.5, -2, -4]
    assert second == [9, 2j, 2j, 1.5 + 3j, 4.5, -2, -4]


def complex_sharded() -> float:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DeviceMesh

    group = engine_group()
    torch.manual_seed(0)
    module = nn.Linear(4, 4, dtype=torch.complex64)
    fully_shard(module, mesh=DeviceMesh.from_group(group, "cpu"))
    module(torch.ones(2, 4, dtype=torch.complex64)).abs().sum().backward()
    return float(module.weight.grad.full_tensor().abs().sum())


def test_fsdp2_trains_complex_parameters(world_pool: WorldPool) -> None:
    torch.manual_seed(0)
    module = nn.Linear(4, 4, dtype=torch.complex64)
    module(torch.ones(2, 4, dtype=torch.complex64)).abs().sum().backward()
    right = float(module.weight.grad.abs().sum())
    assert world_pool.run(2, complex_sharded) == pytest.approx([right] * 2)


def sums_that_are_refused() -> list[str]:
    group, told = engine_group(), []
    for dtype in (torch.uint16, torch.float8_e5m2):
        with pytest.raises(TypeError) as caught:
            dist.all_reduce(torch.zeros(1, dtype=dtype), group=group)
        told.append(str(caught.value).splitlines()[0])
    return told


def test_a_dtype_that_is_not_summed_is_named(world_pool: WorldPool) -> None:
    rule = "tensors of this dtype can be moved but not reduced"
    told = [f"shardwise engine: sum of {dtype}: {rule}" for dtype in ("UInt16", "Float8_e5m2")]
    assert world_pool.run(2, sums_that_are_refused) == [told, told]


# --- forms of calls


def uneven_lists() -> list[Any]:
    group, rank, size = engine_group(), dist.get_rank(), dist.get_world_size()
    found = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist._make_nccl_premul_sum(0.5)):
        out = torch.zeros(rank)
        dist.reduce_scatter(out, [torch.full((to,), 2.0 * (rank + 1)) for to in range(size)], op, group)
        found.append(out.tolist())
    return found


def test_reduce_scatter_of_lists_with_unequal_parts(world_pool: WorldPool) -> None:
    for rank, found in enumerate(world_pool.run(3, uneven_lists)):
        assert found == [[12.0] * rank, [4.0] * rank, [6.0] * rank, [6.0] * rank]


def uneven_scaled_sum() -> bool:
    group, rank, size = engine_group(), dist.get_rank(), dist.get_world_size()

    def part(source: int, to: int) -> torch.Tensor:
        return torch.randn(100 + to, generator=torch.Generator().manual_seed(source)).bfloat16()

    out = torch.zeros_like(part(rank, rank))
    parts = [part(rank, to) for to in range(size)]
    dist.reduce_scatter(out, parts, dist._make_nccl_premul_sum(0.3), group)
    return torch.equal(out, sum(part(source, rank).float() * 0.3 for source in range(size)).bfloat16())


def test_a_scaled_sum_of_unequal_parts_is_rounded_once(world_pool: WorldPool) -> None:
    assert world_pool.run(2, uneven_scaled_sum) == [True, True]


def coalesced() -> list[Any]:
    group, rank = engine_group(), dist.get_rank()
    twice, whole = torch.ones(2), torch.ones(4)
    dist.all_reduce_coalesced([twice, twice, whole[:3], whole[1:]], group=group)
    ones = [torch.ones(2), torch.ones(3)]
    with _coalescing_manager(group, async_ops=True) as manager:
        for each in ones:
            dist.all_reduce(each, group=group)
    manager.wait()
    other = torch.zeros(2)
    with _coalescing_manager(group, torch.device("cpu"), async_ops=True) as manager:
        dist.isend(torch.full((2,), float(rank)), 1 - rank, group)
        dist.irecv(other, 1 - rank, group)
    manager.wait()
    received = [torch.zeros(1), torch.zeros(1)]
    operations = [dist.P2POp(dist.isend, torch.tensor([float(rank)]), 1 - rank, group, tag) for tag in (0, 1)]
    operations += [dist.P2POp(dist.irecv, received[tag], 1 - rank, group, tag) for tag in (1, 0)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return [each.tolist() for each in (twice, whole, *ones, other, torch.cat(received))]


def test_calls_of_several_operations(world_pool: WorldPool) -> None:
    for rank, found in enumerate(world_pool.run(2, coalesced)):
        other = float(1 - rank)
        assert found == [[2.0] * 2, [2.0] * 4, [2.0] * 2, [2.0] * 3, [other] * 2, [other] * 2]


def split() -> tuple[list[float], list[int]]:
    group, rank = engine_group(), dist.get_rank()
    pair = [0, 2] if rank in (0, 2) else [1]
    part = group.split_group(pair, timedelta(seconds=20), None, f"part{pair[0]}", None)
    data = torch.ones(1) * (rank + 1)
    part.allreduce([data]).wait()
    ranks = part._get_backend(torch.device("cpu")).options.global_ranks_in_group
    return data.tolist(), list(ranks)


def test_a_group_is_split(world_pool: WorldPool) -> None:
    assert world_pool.run(3, split) == [([4.0], [0, 2]), ([2.0], [1]), ([4.0], [0, 2])]


def shrunk() -> list[float]:
    group, rank = engine_group(), dist.get_rank()
    pending = dist.all_reduce(torch.ones(1), group=group, async_op=True) if rank else None
    if rank == 1:
        with pytest.raises(RuntimeError, match="aborted the group"):
            pending.wait()
        return []
    rest = dist.shrink_group([1], group, dist.distributed_c10d.SHRINK_ABORT)
    data = torch.ones(1) * (rank + 1)
    dist.all_reduce(data, group=rest)
    return data.tolist()


def test_a_group_is_shrunk(world_pool: WorldPool) -> None:
    assert world_pool.run(3, shrunk) == [[4.0], [], [4.0]]


# --- what torch asks beside operations


def shorter_timeout(shorten: Callable[[timedelta, Any], None]) -> tuple[str, float]:
    group = engine_group()
    shorten(timedelta(seconds=0.3), group)
    backend = group._get_backend(torch.device("cpu"))
    assert backend.options._timeout == timedelta(seconds=0.3)
    if dist.get_rank() == 1:
        dist.recv(torch.empty(1), 0)  # on another group, until rank 0 has waited
        return "", 0.0
    began = time.monotonic()
    with pytest.raises(dist.DistBackendError) as caught:
        dist.all_reduce(torch.ones(1), group=group)
    seconds = time.monotonic() - began
    dist.send(torch.ones(1), 1)
    return str(caught.value), seconds


def set_by_group(timeout: timedelta, group: Any) -> None:
    group.set_timeout(timeout)


def set_by_module(timeout: timedelta, group: Any) -> None:
    dist.distributed_c10d._set_pg_timeout(timeout, group)


@pytest.mark.parametrize("shorten", [set_by_group, set_by_module])
def test_a_timeout_that_is_shortened_later_holds(world_pool: WorldPool, shorten: Any) -> None:
    told, seconds = world_pool.run(2, shorter_timeout, shorten)[0]
    assert "Timed out waiting: all_reduce #1" in told and "missing rank 1" in told
    assert seconds < 10


def asked() -> list[Any]:
    group = engine_group()
    backend = group._get_backend(torch.device("cpu"))
    before = backend._get_sequence_number_for_group()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dist.all_reduce(torch.ones(2), group=group)
        dist.barrier(group)
    names = {event.name for event in profile.events()}
    backend.monitored_barrier(timedelta(seconds=5), True)
    try:
        assert group._get_sequence_number_for_group() == backend._get_sequence_number_for_group()
    except RuntimeError as error:  # torch refuses by type, before 2.14
        assert "does not yet support sequence numbers" in str(error)
    options = backend.options
    after = backend._get_sequence_number_for_group()
    return [after - before, names >= {"shardwise:all_reduce", "shardwise:barrier"}, options.backend, options._timeout]


def test_sequence_numbers_traces_and_options(world_pool: WorldPool) -> None:
    assert world_pool.run(2, asked) == [[3, True, "shardwise", timedelta(seconds=30)]] * 2


def monitored() -> list[str]:
    groups, rank = [engine_group(), engine_group()], dist.get_rank()
    told = []
    for group in groups:
        dist.monitored_barrier(group, timedelta(seconds=20))
        if rank in (0, 3):
            with pytest.raises(dist.DistBackendError) as caught:
                dist.monitored_barrier(group, timedelta(seconds=0.2), wait_all_ranks=not told)
            told.append(str(caught.value))
        dist.barrier()
    return told


def test_a_monitored_barrier_names_who_does_not_come(world_pool: WorldPool) -> None:
    first, *others, last = world_pool.run(4, monitored)
    assert others == [[], []]
    assert "Rank 0 timed out in monitoredBarrier after 200 ms: Ranks 1, 2 failed to pass monitoredBarrier" in first[0]
    assert "Rank 1 failed to pass monitoredBarrier" in first[1]
    assert all("Rank 3 successfully reached monitoredBarrier" in told for told in last)


def gathered_shards(directory: str) -> Any:
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    registration.register()
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    store = dist.FileStore(f"{directory}/store", size)
    dist.init_process_group("shardwise", store=store, rank=rank, world_size=size)
    shards = sharded_tensor.ones(ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"]), 4, 2)
    out = torch.zeros(4, 2) if rank == 0 else None
    shards.gather(0, out)
    dist.barrier()
    return None if out is None else out.tolist()


@pytest.mark.filterwarnings("ignore:Please use DTensor instead")
def test_sharded_tensors_of_the_cpu_are_gathered(world_pool: WorldPool, tmp_path: Any) -> None:
    assert world_pool.run(2, gathered_shards, str(tmp_path)) == [[[1.0, 1.0]] * 4, None]


def test_the_devices_are_those_that_the_host_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(registration, "ACCELERATOR_FILES", ("/no/such/file",))
    assert registration._devices() == ["cpu"]
    monkeypatch.setattr(registration, "ACCELERATOR_FILES", ("/no/such/file", str(engine.SOURCES)))
    assert registration._devices() == ["cpu", "cuda"]
