"""Callbacks that wait, and groups that are dropped: in any order, in a fork, at the interpreter's end."""

from __future__ import annotations

import functools
import gc
import os
import subprocess
import sys
import threading
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from shardwise.collectives import engine, registration
from shardwise.testing.world import WorldPool


def engine_group(seconds: float = 20) -> Any:
    registration.register()
    return dist.new_group(backend="shardwise", timeout=timedelta(seconds=seconds))


def made_again() -> list[float]:
    """Groups of one name and store, each after the one before was destroyed, as `init_process_group` makes them."""
    store = dist.PrefixStore("made again", dist.distributed_c10d._get_default_store())
    rank, totals = dist.get_rank(), []
    for number in range(3):
        backend = engine.create(store, rank, [0, 1], timedelta(seconds=20))
        values = torch.full((2,), float(number + rank))
        backend.allreduce([values]).wait()
        totals.append(values.tolist()[0])
        backend.shutdown()
        del backend
    return totals


def test_a_group_may_be_made_again_after_its_end(world_pool: WorldPool) -> None:
    assert world_pool.run(2, made_again) == [[1.0, 3.0, 5.0]] * 2


# --- callbacks


def waiting_callbacks() -> list[list[float]]:
    """Each waits for an operation that it starts, three deep; and several at once."""
    group = engine_group()

    def summed(values: torch.Tensor, depth: int) -> torch.Tensor:
        future = dist.all_reduce(values, group=group, async_op=True).get_future()
        if depth == 0:
            return future.wait()[0]
        return future.then(lambda done: summed(done.value()[0], depth - 1)).wait()

    deep = summed(torch.ones(2), 3)
    several = [dist.all_reduce(torch.ones(1), group=group, async_op=True).get_future() for _ in range(20)]
    order: list[int] = []
    first = several[0].then(lambda _: order.append(1))
    second = several[0].then(lambda _: order.append(2))
    torch.futures.wait_all([first, second, *several])
    return [deep.tolist(), order]


def test_a_callback_may_wait_for_what_it_starts(world_pool: WorldPool) -> None:
    assert world_pool.run(2, waiting_callbacks) == [[[16.0, 16.0], [1, 2]]] * 2


def ordered_callbacks() -> list[Any]:
    """What callbacks start comes right after their operation, though the ranks' threads get to it at other times."""
    group, rank = engine_group(), dist.get_rank()
    sums = []

    def then(size: int, done: Any) -> Any:
        time.sleep(0.02 * (rank == size % 2))
        values = torch.full((size,), float(done.value()[0].flatten()[0]))
        return dist.all_reduce(values, group=group, async_op=True).get_future().wait()[0]

    for size in range(1, 9):
        first = dist.all_reduce(torch.full((10 + size,), float(size)), group=group, async_op=True).get_future()
        sums.append(first.then(functools.partial(then, size)).then(functools.partial(then, 20 + size)))
    return [future.wait().tolist() for future in sums]


def test_what_callbacks_start_has_one_order_on_all_ranks(world_pool: WorldPool) -> None:
    assert world_pool.run(2, ordered_callbacks) == [[[8.0 * size] * (20 + size) for size in range(1, 9)]] * 2


def waits_for_later() -> list[float]:
    """A callback of rank 0 waits for an operation that comes after its own."""
    group, rank = engine_group(), dist.get_rank()
    first, later = torch.ones(1), torch.full((1,), 3.0)
    if rank == 1:
        dist.recv(torch.empty(1), 0)  # so rank 0's callback is there before its operation ends
        dist.all_reduce(first, group=group)
        dist.all_reduce(later, group=group)
        return later.tolist()
    works = []
    future = dist.all_reduce(first, group=group, async_op=True).get_future()
    called_back = future.then(lambda _: works[0].wait())
    works.append(dist.all_reduce(later, group=group, async_op=True))
    dist.send(torch.ones(1), 1)
    called_back.wait()
    return later.tolist()


def test_a_callback_that_waits_for_a_later_operation_is_left_to_itself(world_pool: WorldPool) -> None:
    assert world_pool.run(2, waits_for_later) == [[6.0]] * 2


def late_in_callback() -> str:
    group, rank = engine_group(0.5), dist.get_rank()
    future = dist.all_reduce(torch.ones(1), group=group, async_op=True).get_future()
    if rank == 1:
        future.wait()
        dist.recv(torch.empty(1), 0)
        return ""
    try:
        future.then(lambda _: dist.all_reduce(torch.ones(1), group=group, async_op=True).get_future().wait()).wait()
    except RuntimeError as error:
        return str(error)
    finally:
        dist.send(torch.ones(1), 1)
    return "nothing"


def test_what_a_callback_waits_for_times_out(world_pool: WorldPool) -> None:
    assert "Timed out waiting: all_reduce #2" in world_pool.run(2, late_in_callback)[0]


def hooked(name: str) -> list[float]:
    group = engine_group()
    torch.manual_seed(0)
    module = DistributedDataParallel(nn.Linear(64, 64), process_group=group)
    if name == "powerSGD":
        state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=1, start_powerSGD_iter=2)
        module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        module.register_comm_hook(group, getattr(default_hooks, name))
    optimizer, losses = torch.optim.SGD(module.parameters(), 0.01), []
    for _ in range(4):
        loss = module(torch.ones(4, 64)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", ["powerSGD", "fp16_compress_hook"])
def test_ddp_trains_with_hooks_of_torch(world_pool: WorldPool, name: str) -> None:
    first, second = world_pool.run(2, hooked, name)
    assert first == second and first == sorted(first, reverse=True) and len(set(first)) == 4


# --- ends


def dropped() -> int:
    """The backend goes first, with many futures behind it, and while its worker needs the interpreter's lock."""
    rank, size = dist.get_rank(), dist.get_world_size()
    registration.register()
    store = dist.PrefixStore("dropped", dist.distributed_c10d._get_default_store())
    backend = engine.create(store, rank, list(range(size)), timedelta(seconds=20))
    values = [torch.tensor([index]) for index in range(300)]
    works = [backend.allreduce([value]) for value in values]
    futures = [work.get_future() for work in works[::2]]
    for value in values:
        value.mine = threading.Lock()  # an attribute of Python's: the last owner frees it under the lock
    del value, values, works, backend
    gc.collect()
    return sum(int(future.wait()[0]) for future in futures)


def test_a_backend_is_dropped_before_its_futures(world_pool: WorldPool) -> None:
    assert world_pool.run(4, dropped) == [4 * sum(range(0, 300, 2))] * 4


def dropped_by_callback() -> bool:
    """The last owner of a backend is a callback of its own."""
    rank, over = dist.get_rank(), threading.Event()
    registration.register()
    store = dist.PrefixStore("in_callback", dist.distributed_c10d._get_default_store())
    owned = [engine.create(store, rank, [0, 1], timedelta(seconds=20))]
    future = owned[0].allreduce([torch.ones(1)]).get_future()
    future.then(lambda _: (owned.clear(), over.set()))
    return over.wait(20) and future.wait()[0].item() == 2


def test_a_callback_drops_its_backend(world_pool: WorldPool) -> None:
    assert world_pool.run(2, dropped_by_callback) == [True, True]


def forked() -> str:
    group = engine_group()
    future = dist.all_reduce(torch.ones(1), group=group, async_op=True).get_future()
    future.then(lambda _: None).wait()
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads beside a fork
        child = os.fork()
    if child == 0:
        try:
            dist.all_reduce(torch.ones(1), group=group)
        except RuntimeError as error:
            os.write(writing, str(error).encode()[:500])
        dist.destroy_process_group(group)
        del group
        gc.collect()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    os.close(writing)
    with os.fdopen(reading) as told:
        text = told.read()
    dist.all_reduce(torch.ones(1), group=group)  # the child's end is not its parent's
    return text


def test_a_fork_is_told_that_its_parent_has_the_group(world_pool: WorldPool) -> None:
    for told in world_pool.run(2, forked):
        assert "this process is a fork, and a group belongs to the process that made it" in told


EXITS = {
    "in flight": "dist.all_reduce(torch.ones(1), async_op=True)",
    "alone in flight": "dist.all_reduce(torch.ones(1), async_op=True) if rank == 0 else None",
    "exception": "kept = dist.all_reduce(torch.ones(1), async_op=True).get_future(); raise SystemExit(3)",
    "callback": "dist.all_reduce(torch.ones(1), async_op=True).get_future().then(lambda f: f.value())",
    "receiving": "kept = dist.irecv(torch.ones(1), 1 - rank)",
    "at exit": "import atexit; atexit.register(lambda: dist.barrier())",
}
PROGRAM = """
import sys, torch, torch.distributed as dist
from datetime import timedelta
from shardwise.collectives.registration import register
register()
rank = int(sys.argv[1])
dist.init_process_group("shardwise", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
dist.barrier()
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", EXITS)
def test_an_interpreter_ends_with_a_group_open(tmp_path: Path, how: str) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM + EXITS[how], str(rank), str(tmp_path / "store")],
            env=environment, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        ends = [(process.communicate(timeout=60)[1], process.returncode) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    expected = 3 if how == "exception" else 0
    assert [code for _, code in ends] == [expected] * 2, ends
