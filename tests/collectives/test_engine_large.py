"""Large tensors on one host go other ways (a chain of sums, stores past the caches), with the same bits."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwise._torch_compat.groups import all_gather_single, reduce_scatter_single
from shardwise.collectives import registration
from shardwise.testing.world import WorldPool

LARGE = 4_200_003  # elements: of three ranks' outputs together more than caches keep; odd, so that no part is aligned
ENOUGH = 1_100_003  # of each rank's part for a chain of three ranks
FACTOR = 0.3


def numbers(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    """A rank's input, which does not start where vectors like it to."""
    generator = torch.Generator().manual_seed(rank)
    if dtype.is_floating_point:
        return torch.rand(count + 1, generator=generator).sub_(0.5).to(dtype)[1:]
    return torch.randint(-9, 9, (count + 1,), generator=generator).to(dtype)[1:]


def join_chunks(name: str, inputs: list[Tensor]) -> Tensor:
    """The reduction in the order of the ranks, in the type in which the engine keeps it, rounded once."""
    dtype = inputs[0].dtype
    wide = [x.float() if dtype in (torch.bfloat16, torch.float16) else x for x in inputs]
    if name == "scaled":
        wide = [x * torch.tensor(FACTOR, dtype=x.dtype) for x in wide]
    total = wide[0].clone()
    for other in wide[1:]:
        total = torch.maximum(total, other) if name == "max" else total + other
    if name == "avg":
        total = total / torch.full_like(total, len(inputs))
    return total.to(dtype)


def operator(name: str) -> Any:
    if name == "scaled":
        return dist._make_nccl_premul_sum(FACTOR)
    return {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX}[name]


def sums(cases: list[tuple[str, torch.dtype]], count: int) -> None:
    registration.register()
    group, rank, size = dist.new_group(backend="shardwise"), dist.get_rank(), dist.get_world_size()
    for name, dtype in cases:
        inputs = [numbers(peer, count * size, dtype) for peer in range(size)]
        right, part = join_chunks(name, inputs), torch.empty(count, dtype=dtype)
        reduce_scatter_single(part, inputs[rank], operator(name), group)
        assert torch.equal(part, right[rank * count : (rank + 1) * count]), (name, dtype)
        dist.all_reduce(inputs[rank], operator(name), group)
        assert torch.equal(inputs[rank], right), (name, dtype)
        dist.barrier(group)  # which stages nothing, and is followed by what does
        dist.all_reduce(small := torch.ones(30_000), group=group)
        assert (small == size).all()


def test_sums_of_a_chain_are_those_in_the_order_of_the_ranks(world_pool: WorldPool) -> None:
    world_pool.run(3, sums, [("sum", torch.float32)], ENOUGH)


def keeps_its_cores() -> None:
    """While ranks add, each may keep to one core; whoever called them has all cores again, also after an error."""
    registration.register()
    group, rank, cores = dist.new_group(backend="shardwise"), dist.get_rank(), os.sched_getaffinity(0)
    for _ in range(5):
        dist.all_reduce(torch.ones(1 << 20), group=group)
        assert os.sched_getaffinity(0) == cores
    os.sched_setaffinity(0, {min(cores)} if rank == 0 else cores)  # ranks that may not use the same cores
    dist.all_reduce(sums := torch.ones(1 << 20), group=group)
    assert (sums == dist.get_world_size()).all()
    assert len(os.sched_getaffinity(0)) == (1 if rank == 0 else len(cores))
    os.sched_setaffinity(0, cores)
    with pytest.raises(RuntimeError, match="all_reduce"):
        dist.all_reduce(torch.ones((1 << 20) + rank), group=group)
    assert os.sched_getaffinity(0) == cores


def test_ranks_have_all_their_cores_after_a_sum(world_pool: WorldPool) -> None:
    world_pool.run(4, keeps_its_cores)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "count"), [(2, 6_300_007), (3, LARGE), (4, 1_500_001), (5, 3_000_001)])
def test_reductions_of_large_tensors(world_pool: WorldPool, ranks: int, count: int) -> None:
    cases = [("avg", torch.float32), ("scaled", torch.float32), ("max", torch.float64), ("sum", torch.int32)]
    cases += [("sum", torch.uint8), ("sum", torch.bfloat16), ("sum", torch.float16), ("avg", torch.float16)]
    world_pool.run(ranks, sums, cases, count, timeout=280)


def moves(kinds: list[str]) -> None:
    registration.register()
    group, rank, size = dist.new_group(backend="shardwise"), dist.get_rank(), dist.get_world_size()
    inputs = [numbers(peer, LARGE, torch.float32) for peer in range(size)]
    mine, whole = inputs[rank], torch.empty(size * LARGE + 1)[1:]
    out, parts = torch.empty(LARGE + 1)[1:], list(whole.chunk(size))
    thirds = [x[: LARGE // size * size].chunk(size) for x in inputs]
    run: dict[str, Callable[[], Any]] = {
        "all_gather": lambda: all_gather_single(whole, mine, group=group),
        "gather": lambda: dist.gather(mine, parts if rank == 1 else None, 1, group),
        "scatter": lambda: dist.scatter(out, inputs if rank == 1 else None, 1, group),
        "broadcast": lambda: dist.broadcast(out, 1, group),
        "all_to_all": lambda: dist.all_to_all(list(out[: LARGE // size * size].chunk(size)), list(thirds[rank]), group),
    }
    right = {
        "all_gather": lambda: torch.equal(whole, torch.cat(inputs)),
        "gather": lambda: rank != 1 or torch.equal(whole, torch.cat(inputs)),
        "scatter": lambda: torch.equal(out, inputs[rank]),
        "broadcast": lambda: torch.equal(out, inputs[1]),
        "all_to_all": lambda: torch.equal(out[: LARGE // size * size], torch.cat([x[rank] for x in thirds])),
    }
    for kind in kinds:
        whole.zero_()
        out.copy_(inputs[rank]) if kind == "broadcast" else out.zero_()
        run[kind]()
        assert right[kind](), kind


def test_large_tensors_come_whole(world_pool: WorldPool) -> None:
    world_pool.run(3, moves, ["all_gather"])


@pytest.mark.slow
def test_large_tensors_of_every_kind_come_whole(world_pool: WorldPool) -> None:
    kinds = ["all_gather", "gather", "scatter", "broadcast", "all_to_all"]
    world_pool.run(4, moves, kinds * 2, timeout=120)
