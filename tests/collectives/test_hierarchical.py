"""Two-level collectives against the flat ones, on hosts that the variable SHARDWISE_HOST makes on one machine."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from shardwise._torch_compat.groups import all_gather_single, clear_placement_cache, reduce_scatter_single
from shardwise.collectives import hierarchical, topology
from shardwise.collectives.fsdp import use_two_levels
from shardwise.collectives.hierarchical import HierarchicalGroup
from shardwise.commands.verify import verify_rank
from shardwise.testing.world import WorldPool
from tests.parity.jobs import make_job

DTYPES = (torch.float64, torch.bfloat16, torch.int32, torch.bool)
ROUNDS = 500
REDUCTIONS: dict[Any, Callable[[Tensor], Tensor]] = {
    dist.ReduceOp.SUM: lambda x: x.sum(0),
    dist.ReduceOp.AVG: lambda x: x.sum(0) / len(x),
    dist.ReduceOp.MIN: lambda x: x.amin(0),
    dist.ReduceOp.MAX: lambda x: x.amax(0),
    dist.ReduceOp.PRODUCT: lambda x: x.prod(0),
}


def on_host(hosts: str) -> None:
    """One letter a rank names its host; Gloo stays on the loopback interface."""
    os.environ[topology.HOST_VARIABLE] = hosts[dist.get_rank()]
    os.environ["LOCAL_WORLD_SIZE"] = str(hosts.count(hosts[0]))


@contextmanager
def joined(hosts: str, algorithm: str, inside: str = "gloo") -> Iterator[None]:
    """The world of the pool once more, with the backend under test as its own."""
    on_host(hosts)
    rank, size, world = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    assert world is not None
    store = dist.PrefixStore(f"{hosts}-{algorithm}-{inside}", world.get_group_store())
    dist.destroy_process_group()
    name = hierarchical.register_two_levels(algorithm, "gloo", inside)
    dist.init_process_group(name, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    yield
    dist.barrier()


# --- single operations


def numbers(count: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Every rank's input: small whole numbers, so that sums and products are exact in any order."""
    make = torch.Generator().manual_seed(count)
    return [torch.randint(1, 4, (count,), generator=make).to(dtype) for _ in range(dist.get_world_size())]


def operations(hosts: str, algorithm: str, inside: str, counts: tuple[int, ...] = (1, 333)) -> str:
    """All operations, waited for at once and later; the type of the group."""
    group = dist.new_group(backend=hierarchical.register_two_levels(algorithm, "gloo", inside))
    for count in counts:
        for dtype in DTYPES:
            gathered(group, count, dtype)
        for reduction in REDUCTIONS:
            reduced(group, count, reduction)
    kept_in_order(group)
    told = torch.tensor([dist.get_rank()])
    dist.broadcast(told, 1, group)  # what has no levels runs flat
    assert told.item() == 1
    kind = type(group).__name__
    dist.barrier(group)
    dist.destroy_process_group(group)
    return kind


def gathered(group: Any, count: int, dtype: torch.dtype) -> None:
    pieces, rank = numbers(count, dtype), dist.get_rank()
    whole = torch.empty(count * len(pieces), dtype=dtype)
    all_gather_single(whole, pieces[rank], group=group)
    assert torch.equal(whole, torch.cat(pieces))
    whole.zero_()
    own = whole[count * rank : count * (rank + 1)]  # FSDP2 gathers in place
    own.copy_(pieces[rank])
    all_gather_single(whole, own, group=group, async_op=True).wait()
    assert torch.equal(whole, torch.cat(pieces))


def reduced(group: Any, count: int, reduction: Any) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    wholes = numbers(count * size)
    right = REDUCTIONS[reduction](torch.stack(wholes))
    piece = torch.empty(count, dtype=torch.float64)
    reduce_scatter_single(piece, wholes[rank].clone(), reduction, group)
    torch.testing.assert_close(piece, right[count * rank : count * (rank + 1)], rtol=1e-15, atol=0)
    for numel in (count * size, count * size - 1):  # the second does not divide
        mine = wholes[rank][:numel].clone()
        dist.all_reduce(mine, reduction, group)
        torch.testing.assert_close(mine, right[:numel], rtol=1e-15, atol=0)


def kept_in_order(group: Any) -> None:
    """Pending calls, one that is waited for at once, and another of each kind: no part overtakes another."""
    size, rank = dist.get_world_size(), dist.get_rank()
    many = [torch.full((1000,), float(rank + step), dtype=torch.float64) for step in range(6)]
    works = [dist.all_reduce(each, group=group, async_op=True) for each in many]
    now = torch.tensor([float(rank)], dtype=torch.float64)
    dist.all_reduce(now, group=group)
    whole = torch.empty(size, dtype=torch.float64)
    works.append(all_gather_single(whole, now, group=group, async_op=True))
    for work in works:
        work.wait()
    base = size * (size - 1) / 2
    assert now.item() == base and whole.tolist() == [base] * size
    assert [each[0].item() for each in many] == [base + size * step for step in range(6)]


def several(cases: list[tuple[str, str, str]]) -> list[str]:
    kinds = []
    for hosts, algorithm, inside in cases:
        on_host(hosts)
        kinds.append(operations(hosts, algorithm, inside))
    return kinds


def test_two_levels_give_what_flat_gives(world_pool: WorldPool) -> None:
    cases = [(hosts, how, "gloo") for hosts in ("aabb", "abba") for how in ("two_level", "direct")]
    cases += [("abab", "direct", "shardwise")]
    for kinds in world_pool.run(4, several, cases):
        assert kinds == ["HierarchicalGroup"] * len(cases)


@pytest.mark.slow
@pytest.mark.parametrize("inside", ["gloo", "shardwise"])
@pytest.mark.parametrize("hosts", ["aabbccdd", "aaaabbbb", "abcdabcd", "abccab", "aaabbb"])
def test_two_levels_on_more_shapes(world_pool: WorldPool, hosts: str, inside: str) -> None:
    cases = [(hosts, how, inside) for how in ("two_level", "direct")]
    assert world_pool.run(len(hosts), several, cases)[0] == ["HierarchicalGroup"] * 2


def flat_with_lines(cases: list[tuple[str, str, str]]) -> tuple[list[str], list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        kinds = several(cases)
    return kinds, [str(line.message) for line in caught if "stay flat" in str(line.message)]


@pytest.mark.slow
def test_uneven_hosts_stay_flat_and_say_so_once(world_pool: WorldPool) -> None:
    cases = [
        ("aaab", "direct", "gloo"),
        ("aaab", "direct", "gloo"),
        ("aaaa", "direct", "gloo"),
        ("abcd", "direct", "gloo"),
    ]
    results = world_pool.run(4, flat_with_lines, cases)
    line = "collectives of these 4 ranks stay flat: their hosts have 3 and 1 of them"
    assert [lines for _, lines in results] == [[line], [], [], []]
    assert {kind for kinds, _ in results for kind in kinds} == {"ProcessGroup"}


def subgroup() -> tuple[str, float]:
    """A group of some ranks, in another order of hosts than the world's."""
    on_host("aabbaabb")
    members = [1, 2, 4, 7]  # a b a b
    group = dist.new_group(members, backend=hierarchical.register_two_levels("direct", "gloo", "gloo"))
    total = torch.tensor([float(dist.get_rank())])
    if dist.get_rank() in members:
        dist.all_reduce(total, group=group)
    dist.barrier()
    return type(group).__name__, total.item()


@pytest.mark.slow
def test_a_group_of_some_ranks(world_pool: WorldPool) -> None:
    results = world_pool.run(8, subgroup)
    assert [results[rank] for rank in (1, 2, 4, 7)] == [("HierarchicalGroup", 14.0)] * 4
    assert results[0][1] == 0


def broadcasts(rounds: int) -> int:
    """Short-lived tensors through the flat group: what C++ called with Python's lock held hung within seconds."""
    on_host("aabb")
    group = dist.new_group(backend=hierarchical.register_two_levels("direct", "gloo", "gloo"))
    return sum(_told(group, number) for number in range(rounds))


def _told(group: Any, number: int) -> int:
    tensor = torch.tensor([number if dist.get_rank() == 0 else -1])
    dist.broadcast(tensor, 0, group)
    return int(tensor.item() == number)


def test_flat_operations_do_not_hold_pythons_lock(world_pool: WorldPool) -> None:
    assert world_pool.run(4, broadcasts, ROUNDS, timeout=60) == [ROUNDS] * 4


def outside_of_the_graph() -> list[Any]:
    """Tensors of autograd's graph, at once and later, and sparse ones: as on any backend of torch's."""
    on_host("aabb")
    group = dist.new_group(backend=hierarchical.register_two_levels("two_level", "gloo", "gloo"))
    weight = torch.ones(3, requires_grad=True)
    loss = weight.sum()
    dist.all_reduce(loss, group=group)
    (gradient,) = torch.autograd.grad(loss, weight)
    leaf, whole = torch.ones(5, requires_grad=True), torch.empty(4)
    dist.all_reduce(leaf, dist.ReduceOp.AVG, group, async_op=True).wait()
    all_gather_single(whole, torch.ones(1, requires_grad=True), group=group)
    sparse = torch.sparse_coo_tensor(torch.tensor([[dist.get_rank()]]), torch.ones(1), (4,))
    dist.all_reduce(sparse, group=group)
    sums = sparse.to_dense().tolist()
    return [loss.item(), gradient.tolist(), leaf.tolist(), leaf.is_leaf, whole.requires_grad, sums]


def test_operations_are_in_no_graph(world_pool: WorldPool) -> None:
    assert world_pool.run(4, outside_of_the_graph) == [[12.0, [1.0] * 3, [1.0] * 5, True, False, [1.0] * 4]] * 4


def mistaken() -> list[str]:
    on_host("aabb")
    group = dist.new_group(backend=hierarchical.register_two_levels("direct", "gloo", "gloo"))
    messages = []
    for call in (
        lambda: all_gather_single(torch.empty(7), torch.empty(2), group=group),
        lambda: dist.all_reduce(torch.zeros(2, dtype=torch.bfloat16), dist.ReduceOp.BAND, group),
    ):
        try:
            call()
        except (RuntimeError, ValueError) as error:
            messages.append(str(error))
    return messages


def test_mistakes_get_the_flat_operations_errors(world_pool: WorldPool) -> None:
    for messages in world_pool.run(4, mistaken):
        assert len(messages) == 2 and all(messages)


# --- PyTorch programs on top


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).double()


def rows() -> Tensor:
    return torch.randn(2 * dist.get_world_size(), 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def agrees(trained: nn.Module) -> None:
    """Gradients of each rank's own two rows, averaged, against all rows in one process."""
    reference, inputs, rank = model(), rows(), dist.get_rank()
    (reference(inputs).square().sum() / dist.get_world_size()).backward()
    trained(inputs[2 * rank : 2 * rank + 2]).square().sum().backward()
    for ours, theirs in zip(trained.parameters(), reference.parameters(), strict=True):
        gradient = getattr(ours.grad, "full_tensor", lambda grad=ours.grad: grad)()
        torch.testing.assert_close(gradient, theirs.grad, rtol=1e-12, atol=1e-14)


def sharded(mesh: Any = None) -> nn.Module:
    clear_placement_cache()
    made = model()
    fully_shard(made[0], mesh=mesh)
    fully_shard(made, mesh=mesh)
    return made


def programs(hosts: str, algorithm: str) -> None:
    with joined(hosts, algorithm, "shardwise"):
        assert isinstance(dist.group.WORLD, HierarchicalGroup)
        agrees(DistributedDataParallel(model()))
        agrees(sharded())
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        split = distribute_tensor(rows(), mesh, [Shard(0)])
        assert torch.equal(split.full_tensor(), rows())
        torch.testing.assert_close(split.sum().full_tensor(), rows().sum())
        names: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(names, dist.get_rank())
        assert names == list(range(dist.get_world_size()))


def test_ddp_fsdp2_and_dtensor_run_on_it(world_pool: WorldPool) -> None:
    world_pool.run(4, programs, "aabb", "direct")


def replicas(hosts: str) -> None:
    with joined(hosts, "two_level"):
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("replica", "shard"))
        assert isinstance(mesh.get_group("replica"), HierarchicalGroup)
        agrees(sharded(mesh))


@pytest.mark.slow
def test_hsdps_replicas_are_reduced_in_two_levels(world_pool: WorldPool) -> None:
    world_pool.run(8, replicas, "aaaabbbb")


def with_communication_objects(hosts: str) -> list[float]:
    """FSDP2 on groups that torch made, with and without the objects: three steps of SGD each."""
    on_host(hosts)
    plain, ours = sharded(), sharded()
    hierarchies = use_two_levels(ours, "direct")
    rank, inputs = dist.get_rank(), rows()
    for made in (plain, ours):
        optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
        for _ in range(3):
            made(inputs[2 * rank : 2 * rank + 2]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(hierarchies._made) == 1 and (hosts.count("a") != 2) == (None in hierarchies._made.values())
    pairs = zip(plain.parameters(), ours.parameters(), strict=True)
    worst = [(one.full_tensor() - other.full_tensor()).abs().max().item() for one, other in pairs]
    hierarchies.close()
    return worst


@pytest.mark.parametrize("hosts", ["abab", "aaab"])
def test_fsdp2s_communication_objects(world_pool: WorldPool, hosts: str) -> None:
    for worst in world_pool.run(4, with_communication_objects, hosts):
        assert max(worst) <= 1e-14


def verified(directory: str, hosts: str, algorithm: str, parallel: dict[str, Any]) -> tuple[Any, str]:
    with joined(hosts, algorithm):
        job = make_job(directory, "gpt2", parallel={"collective_algorithm": algorithm, **parallel})
        report = verify_rank(job, torch.device("cpu"), steps=2)
        return report and report.agrees, type(dist.group.WORLD).__name__


def test_a_job_agrees_with_one_process(world_pool: WorldPool, corpora: Path) -> None:
    found = world_pool.run(4, verified, str(corpora), "aabb", "direct", {})
    assert found[0] == (True, "HierarchicalGroup")


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["two_level", "direct", "measured"])
@pytest.mark.parametrize(
    "parallel",
    [{"sharded_data_parallel_degree": 2}, {"tensor_parallel_degree": 2}, {"shard_optimizer_state": True}],
    ids=["replicas", "tensor", "zero1"],
)
def test_layouts_agree_with_one_process(
    world_pool: WorldPool, corpora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str, parallel: Any
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = world_pool.run(8, verified, str(corpora), "aaaabbbb", algorithm, parallel)
    assert found[0] == (True, "HierarchicalGroup")
