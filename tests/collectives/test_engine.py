"""The native engine against references in fp64: random operations over random groups, and PyTorch programs on top."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardwise._torch_compat.groups import all_gather_single, reduce_scatter_single
from shardwise.collectives import registration
from shardwise.testing.world import WorldPool

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
SIZES = (0, 1, 3, 64, 1000, 4099, 70_001, 300_007)
CHAINED = 4 << 20  # bytes of a rank's part, from which on three or more ranks add in a chain
REDUCTIONS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}


# --- what a round is: pure functions of its seed, equal on all ranks


def numbers(seed: int, rank: int, count: int, dtype: torch.dtype) -> Tensor:
    """This rank's input of a round, on the default device."""
    generator, device = torch.Generator("cpu").manual_seed(seed * 1000 + rank), torch.get_default_device()
    if dtype.is_floating_point:
        return (torch.rand(count, generator=generator, device="cpu") * 2 - 1).to(device, dtype)
    return torch.randint(0, 3, (count,), generator=generator, device="cpu").to(device, dtype)


def reduced(name: str, inputs: list[Tensor]) -> Tensor:
    """The reduction in fp64, or in whole numbers."""
    wide = torch.stack([x.double() if x.is_floating_point() else x.long() for x in inputs])
    if name in ("min", "max"):
        return getattr(wide, f"a{name}")(0)
    if name == "product":
        return wide.prod(0)
    total = wide.sum(0)
    if name == "sum":
        return total
    return total / len(inputs) if total.is_floating_point() else total // len(inputs)


def check_reduced(name: str, found: Tensor, inputs: list[Tensor]) -> None:
    """Bit-equal where nothing is rounded, else within n eps of the accumulators and one rounding of the output."""
    right = reduced(name, inputs)
    if not found.is_floating_point() or name in ("min", "max"):
        assert torch.equal(found, right.to(found.dtype)), name
        return
    accumulator = torch.float64 if found.dtype == torch.float64 else torch.float32
    sizes = torch.stack([x.double().abs() for x in inputs])
    size = right.abs() if name == "product" else sizes.sum(0) / (len(inputs) if name == "avg" else 1)
    bound = len(inputs) * torch.finfo(accumulator).eps * size + torch.finfo(found.dtype).eps * right.abs()
    bound += torch.finfo(found.dtype).smallest_normal
    assert ((found.double() - right).abs() <= bound).all(), (name, found.dtype)


Round = tuple[Callable[[], Any], Callable[[], None]]  # starts it and gives its Work; checks what came out


def all_gather(seed: int, group: Any, members: list[int], me: int, count: int, dtype: torch.dtype, pick: Any) -> Round:
    inputs = [numbers(seed, rank, count, dtype) for rank in members]
    if pick.random() < 0.5:
        out = torch.empty(count * len(members), dtype=dtype)
        start = lambda: all_gather_single(out, inputs[me], group=group, async_op=True)  # noqa: E731
        return start, lambda: equal(out, torch.cat(inputs))
    outs = [torch.empty(count, dtype=dtype) for _ in members]
    return lambda: dist.all_gather(outs, inputs[me], group, async_op=True), lambda: equal(
        torch.cat(outs), torch.cat(inputs)
    )


def reduce_scatter(
    seed: int, group: Any, members: list[int], me: int, count: int, dtype: torch.dtype, pick: Any
) -> Round:
    inputs = [numbers(seed, rank, count * len(members), dtype) for rank in members]
    name, out = pick.choice([*REDUCTIONS]), torch.empty(count, dtype=dtype)
    op, own = REDUCTIONS[name], [each[me * count : (me + 1) * count] for each in inputs]
    if pick.random() < 0.5:
        start = lambda: reduce_scatter_single(out, inputs[me], op, group, async_op=True)  # noqa: E731
    else:
        parts = list(inputs[me].chunk(len(members))) if count else [out.clone() for _ in members]
        start = lambda: dist.reduce_scatter(out, parts, op, group, async_op=True)  # noqa: E731
    return start, lambda: check_reduced(name, out, own)


def all_reduce(seed: int, group: Any, members: list[int], me: int, count: int, dtype: torch.dtype, pick: Any) -> Round:
    inputs = [numbers(seed, rank, count, dtype) for rank in members]
    name, data = pick.choice([*REDUCTIONS]), inputs[me].clone()
    start = lambda: dist.all_reduce(data, REDUCTIONS[name], group, async_op=True)  # noqa: E731
    return start, lambda: check_reduced(name, data, inputs)


def reduce(seed: int, group: Any, members: list[int], me: int, count: int, dtype: torch.dtype, pick: Any) -> Round:
    inputs = [numbers(seed, rank, count, dtype) for rank in members]
    name, root, data = pick.choice([*REDUCTIONS]), pick.randrange(len(members)), inputs[me].clone()
    start = lambda: dist.reduce(data, members[root], REDUCTIONS[name], group, async_op=True)  # noqa: E731
    return start, lambda: check_reduced(name, data, inputs) if me == root else equal(data, inputs[me])


def broadcast(seed: int, group: Any, members: list[int], me: int, count: int, dtype: torch.dtype, pick: Any) -> Round:
    root = pick.randrange(len(members))
    data = numbers(seed, members[me], count, dtype)
    start = lambda: dist.broadcast(data, members[root], group, async_op=True)  # noqa: E731
    return start, lambda: equal(data, numbers(seed, members[root], count, dtype))


def gather(seed: int, group: Any, members: list[int], me: int, count: int, dtype: torch.dtype, pick: Any) -> Round:
    root = pick.randrange(len(members))
    inputs = [numbers(seed, rank, count, dtype) for rank in members]
    outs = [torch.empty(count, dtype=dtype) for _ in members] if me == root else None
    start = lambda: dist.gather(inputs[me], outs, members[root], group, async_op=True)  # noqa: E731
    return start, lambda: equal(torch.cat(outs), torch.cat(inputs)) if outs else None


def scatter(seed: int, group: Any, members: list[int], me: int, count: int, dtype: torch.dtype, pick: Any) -> Round:
    root, out = pick.randrange(len(members)), torch.empty(count, dtype=dtype)
    parts = [numbers(seed, rank, count, dtype) for rank in members]
    given = parts if me == root else None
    start = lambda: dist.scatter(out, given, members[root], group, async_op=True)  # noqa: E731
    return start, lambda: equal(out, parts[me])


def all_to_all(seed: int, group: Any, members: list[int], me: int, count: int, dtype: torch.dtype, pick: Any) -> Round:
    splits = [[pick.choice((0, count // 3, count)) for _ in members] for _ in members]  # [from][to]
    inputs = [numbers(seed, rank, sum(splits[index]), dtype) for index, rank in enumerate(members)]
    sent, expected = splits[me], [row[me] for row in splits]
    out = torch.empty(sum(expected), dtype=dtype)
    right = torch.cat([whole.split(row)[me] for whole, row in zip(inputs, splits)])
    start = lambda: dist.all_to_all_single(out, inputs[me], expected, sent, group, async_op=True)  # noqa: E731
    return start, lambda: equal(out, right)


def equal(found: Tensor, right: Tensor) -> None:
    assert torch.equal(found, right)


OPERATIONS = (all_gather, reduce_scatter, all_reduce, reduce, broadcast, gather, scatter, all_to_all)


def large_count(operation: Callable[..., Round], ranks: int, dtype: torch.dtype, pick: random.Random) -> int:
    """Elements that take an operation the ways of large tensors; seldom aligned."""
    whole = operation in (all_reduce, reduce, broadcast)  # the others' sizes are those of a part
    return CHAINED // dtype.itemsize * (ranks if whole else 1) + pick.randrange(200_000)


def fuzz(seed: int, rounds: int, large: float = 0.0, backend: str = "shardwise") -> int:
    """Random operations over random groups, up to three under way at once. The seed says it all.

    A share of `large` of the rounds of up to four ranks is of large tensors; references for more need much memory.
    """
    registration.register()
    world, rank, pick = dist.get_world_size(), dist.get_rank(), random.Random(seed)
    subsets = [list(range(world))] + [sorted(pick.sample(range(world), pick.randint(2, world))) for _ in range(4)]
    groups = [dist.new_group(members, backend=backend) for members in subsets]
    under_way: list[tuple[Any, Callable[[], None]]] = []
    for number in range(rounds):
        which, operation = pick.randrange(len(groups)), pick.choice(OPERATIONS)
        dtype, count, more = pick.choice(FLOATS + INTEGERS), pick.choice(SIZES), random.Random(pick.random())
        if len(subsets[which]) <= 4 and pick.random() < large:
            count = large_count(operation, len(subsets[which]), dtype, pick)
        if rank in subsets[which]:
            me = subsets[which].index(rank)
            start, check = operation(seed + number, groups[which], subsets[which], me, count, dtype, more)
            under_way.append((start(), check))
        while len(under_way) > number % 3:
            work, check = under_way.pop(0)
            work.wait()
            check()
    for work, check in under_way:
        work.wait()
        check()
    return rounds


def test_random_operations_over_random_groups(world_pool: WorldPool) -> None:
    assert world_pool.run(4, fuzz, 20261122, 200) == [200] * 4


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 5, 8])
def test_many_random_operations(world_pool: WorldPool, world: int) -> None:
    assert world_pool.run(world, fuzz, 7 * world, 2000, 0.015, timeout=280) == [2000] * world


# --- what the fuzz does not reach


def special_cases(backend: str = "shardwise") -> None:
    registration.register()
    group, rank = dist.new_group(backend=backend), dist.get_rank()
    scaled = torch.full((5,), 2.0)
    dist.all_reduce(scaled, dist._make_nccl_premul_sum(0.5), group)
    equal(scaled, torch.full((5,), 2.0))
    truth = torch.tensor([rank == 0, False])
    dist.all_reduce(truth, dist.ReduceOp.SUM, group)
    equal(truth, torch.tensor([True, False]))
    strided = torch.arange(12.0).view(3, 4).T  # not contiguous: its elements come in the tensor's own order
    dist.all_reduce(strided, group=group)
    equal(strided, 2 * torch.arange(12.0).view(3, 4).T)
    mine = [torch.full((size,), float(rank)) for size in (3, 70_000)]
    dist.all_reduce_coalesced(mine, group=group)
    assert all((each == 1).all() for each in mine)
    assert dist.all_reduce(torch.ones(3), group=group, async_op=True).get_future().wait()[0].tolist() == [2.0] * 3
    objects: list[Any] = [None, None]
    dist.all_gather_object(objects, {"rank": rank}, group)
    assert objects == [{"rank": 0}, {"rank": 1}]
    with pytest.raises(TypeError, match="bitwise operations are for integers"):
        dist.all_reduce(torch.ones(1), dist.ReduceOp.BAND, group)


def test_reductions_layouts_coalescing_futures_objects(world_pool: WorldPool) -> None:
    world_pool.run(2, special_cases)


def messages(backend: str = "shardwise") -> None:
    """Large messages both ways at once, tags out of order, and from any rank."""
    registration.register()
    group, rank, size = dist.new_group(backend=backend), dist.get_rank(), dist.get_world_size()
    out = torch.full((500_000,), rank)
    others = [peer for peer in range(size) if peer != rank]
    received = {peer: torch.empty_like(out) for peer in others}
    works = [dist.isend(out, peer, group) for peer in others]
    works += [dist.irecv(received[peer], peer, group) for peer in others]
    for work in works:
        work.wait()
    assert all((received[peer] == peer).all() for peer in others)
    if rank == 0:
        for tag in (1, 2, 3):
            dist.send(torch.full((20_000,), tag), 1, group, tag)
    elif rank == 1:
        for tag in (3, 1, 2):
            tagged = torch.empty(20_000, dtype=torch.int64)
            dist.recv(tagged, 0, group, tag)
            assert (tagged == tag).all()
    if rank == 0:
        sources = [dist.recv(one := torch.empty(1), None, group) for _ in others]
        assert sorted(sources) == others and one.item() in others
    else:
        dist.send(torch.tensor([float(rank)]), 0, group)
    dist.barrier(group)


def test_messages(world_pool: WorldPool) -> None:
    world_pool.run(3, messages)


def run_to_run() -> bytes:
    registration.register()
    group = dist.new_group(backend="shardwise")
    data = numbers(5, dist.get_rank(), 100_001, torch.float32)
    dist.all_reduce(data, group=group)
    return data.numpy().tobytes()


def test_sums_have_the_same_bits_on_all_ranks_and_runs(world_pool: WorldPool) -> None:
    assert len({each for _ in range(3) for each in world_pool.run(3, run_to_run)}) == 1


# --- programs that know nothing of shardwise


def on_backend(backend: str, directory: str, train: Callable[[], list[Tensor]]) -> list[Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # Gloo hangs on a rank that still connects when its peer closes
    dist.destroy_process_group()
    store = dist.FileStore(f"{directory}/{backend}", size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    assert dist.get_backend() == backend
    result = train()
    dist.barrier()
    return result


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.LayerNorm(64))


def fit(module: nn.Module) -> None:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    for _ in range(3):
        module(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def ddp() -> list[Tensor]:
    module = DistributedDataParallel(model(), bucket_cap_mb=0.05)
    fit(module)
    return [p.detach().clone() for p in module.parameters()]


def fsdp2() -> list[Tensor]:
    from torch.distributed.fsdp import fully_shard

    module = model()
    for layer in module:
        fully_shard(layer)
    fit(fully_shard(module))
    return [p.full_tensor().detach().clone() for p in module.parameters()]


def both(name: str, directory: str) -> float:
    """The largest difference of a parameter between Gloo and the engine."""
    registration.register()
    train = {"ddp": ddp, "fsdp2": fsdp2}[name]
    ours, right = on_backend("shardwise", directory, train), on_backend("gloo", directory, train)
    return max((a - b).abs().max().item() for a, b in zip(ours, right, strict=True))


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_plain_pytorch_trains_on_the_engine(world_pool: WorldPool, name: str, tmp_path: Path) -> None:
    assert max(world_pool.run(2, both, name, str(tmp_path))) < 1e-6
