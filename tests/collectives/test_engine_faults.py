"""The engine under faults: every living rank raises an error that says which rank, which operation and what."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.collectives import engine, registration
from shardwise.collectives.names import CollectiveName
from shardwise.collectives.topology import HOST_VARIABLE
from shardwise.errors import ModelError
from shardwise.testing.world import WorldError, WorldPool

COUNT = 300_000
LARGE = 4_200_003  # on three ranks sums go in a chain, and outputs past the caches


def engine_group(seconds: float = 60) -> Any:
    registration.register()
    return dist.new_group(backend="shardwise", timeout=timedelta(seconds=seconds))


def operate(kind: str, group: Any, count: int = COUNT) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    data, parts = torch.ones(count), [torch.ones(count) for _ in range(size)]
    if kind == "all_gather":
        dist.all_gather(parts, data, group)
    elif kind == "reduce_scatter":
        dist.reduce_scatter(data, parts, group=group)
    elif kind == "all_reduce":
        dist.all_reduce(data, group=group)
    elif kind == "broadcast":
        dist.broadcast(data, 1, group)
    elif kind == "all_to_all":
        dist.all_to_all([torch.empty(count) for _ in parts], parts, group)
    elif kind == "gather":
        dist.gather(data, parts if rank == 0 else None, 0, group)
    elif kind == "scatter":
        dist.scatter(data, parts if rank == 1 else None, 1, group)
    elif kind == "reduce":
        dist.reduce(data, 0, group=group)
    elif kind == "barrier":
        dist.barrier(group)
    elif kind == "messages":
        sent = dist.isend(data, (rank + 1) % size, group)
        dist.recv(data, (rank - 1) % size, group)
        sent.wait()


def killed_in(kind: str, count: int) -> None:
    group = engine_group()
    operate(kind, group, count)
    if dist.get_rank() == 1:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while True:
        operate(kind, group, count)


KINDS = ["all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all"]
KINDS += ["gather", "scatter", "reduce", "barrier", "messages"]
FAULTS = [(kind, COUNT) for kind in KINDS] + [(kind, LARGE) for kind in KINDS[:8]]
OFTEN = (("all_reduce", COUNT), ("messages", COUNT), ("all_reduce", LARGE))


@pytest.mark.parametrize(
    ("kind", "count"), [pytest.param(*f, marks=() if f in OFTEN else pytest.mark.slow) for f in FAULTS]
)
def test_a_killed_rank_is_named(world_pool: WorldPool, kind: str, count: int) -> None:
    with pytest.raises(WorldError) as caught:
        world_pool.run(3, killed_in, kind, count, timeout=60)
    reports = caught.value.reports
    assert "SIGKILL" in reports[1].what
    for rank in (0, 2):
        assert "DistBackendError" in reports[rank].what and "rank 1 (process" in reports[rank].text
        assert "has died" in reports[rank].text and reports[rank].when - reports[1].when < 2.5


def stopped(calls: int = 1) -> tuple[str, float]:
    """Rank 1 stops for longer than the timeout; rank 0 lets it go on. What each rank was told, and after how long."""
    group = engine_group(seconds=1.5)
    processes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(processes, os.getpid())
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    began = time.monotonic()
    try:
        for _ in range(calls):
            dist.all_reduce(torch.ones(9), group=group)
    except dist.DistBackendError as error:
        return str(error), time.monotonic() - began
    finally:
        if dist.get_rank() == 0:
            os.kill(processes[1], signal.SIGCONT)
    return "", 0.0


def test_a_stopped_rank_is_named_after_the_timeout_and_told_itself(world_pool: WorldPool) -> None:
    answers = world_pool.run(3, stopped)
    assert len({text for text, _ in answers}) == 1
    assert "all_reduce #1 (9 x float32, sum) timed out after" in answers[0][0]
    assert "missing rank 1 (last call start #0, heard of" in answers[0][0]
    assert answers[0][1] < 3.5


def stopped_inside(kind: str) -> str:
    """Rank 1 stops somewhere in the middle of large operations, and goes on when the others were told."""
    group, rank = engine_group(seconds=2), dist.get_rank()
    processes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(processes, os.getpid())
    operate(kind, group, LARGE)
    if rank == 1:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGSTOP)).start()
    try:
        while True:
            operate(kind, group, LARGE)
    except dist.DistBackendError as error:
        return str(error)
    finally:
        if rank == 0:
            os.kill(processes[1], signal.SIGCONT)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS[:8])
def test_a_rank_stopped_inside_a_large_operation_is_named(world_pool: WorldPool, kind: str) -> None:
    answers = world_pool.run(3, stopped_inside, kind)
    assert len(set(answers)) == 1
    assert f"{kind} #" in answers[0] and "timed out after" in answers[0] and "missing rank 1 (" in answers[0]


def disagree(case: str) -> str:
    """What this rank is told; afterwards the group says the same again."""
    group, rank = engine_group(seconds=5), dist.get_rank()
    data = torch.ones(10 + rank) if case == "sizes" else torch.ones(10)
    try:
        if case == "dtypes":
            dist.all_reduce(data.double() if rank else data, group=group)
        elif case == "roots":
            dist.broadcast(data, rank, group)
        elif case == "order":
            dist.all_reduce(data, group=group) if rank else dist.broadcast(data, 0, group)
        elif case == "splits":
            dist.all_to_all_single(torch.empty(10), torch.ones(10), [4 + rank, 6 - rank], [5, 5], group)
        elif case == "names":
            with CollectiveName(f"blocks.{rank}", "shard", "all_reduce"):
                dist.all_reduce(data, group=group)
        elif case == "message":
            dist.recv(data, 0, group) if rank else dist.send(data[:4], 1, group)
            dist.barrier(group)
        else:
            dist.all_reduce(data, group=group)
    except (dist.DistBackendError, ModelError) as error:
        with pytest.raises(dist.DistBackendError):
            dist.barrier(group)
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("sizes", ("rank 0: all_reduce #1 (10 x float32, sum)", "rank 1: all_reduce #1 (11 x float32, sum)")),
        ("dtypes", ("rank 0: all_reduce #1 (10 x float32", "rank 1: all_reduce #1 (10 x float64")),
        ("roots", ("root 0)", "root 1)")),
        ("order", ("rank 0: broadcast #1", "rank 1: all_reduce #1")),
        ("splits", ("rank 0 sends 20 bytes to rank 0, which expects 16",)),
        (
            "names",
            (
                "the ranks are out of step: rank 0: all_reduce #1 (10 x float32, sum) of blocks.0 over shard; rank 1: "
                "all_reduce #1 (10 x float32, sum) of blocks.1 over shard. A rank may skip blocks",
            ),
        ),
        ("message", ("recv of 40 bytes (tag 0) from rank 0 met a message of rank 0 of another size: 16 bytes",)),
    ],
)
def test_different_calls_are_told_on_every_rank(world_pool: WorldPool, case: str, words: tuple[str, ...]) -> None:
    for told in world_pool.run(2, disagree, case):
        assert all(word in told for word in words), told


def leave_early() -> str:
    group = engine_group()
    if dist.get_rank() == 0:
        dist.destroy_process_group(group)
        return ""
    with pytest.raises(dist.DistBackendError) as caught:
        dist.barrier(group)
    return str(caught.value)


def test_a_rank_that_left_is_named(world_pool: WorldPool) -> None:
    told = world_pool.run(2, leave_early)[1]
    assert "rank 0 (process" in told and "has left the group; barrier #1 waits for it" in told


def on_hosts(hosts: int, function: Callable[[], Any]) -> Any:
    os.environ[HOST_VARIABLE] = f"host {dist.get_rank() % hosts}"
    try:
        return function()
    finally:
        del os.environ[HOST_VARIABLE]


def from_any_rank() -> list[float]:
    """Rank 1 sends and leaves before rank 2 sends; then nobody is left to send."""
    group, me, data = engine_group(), dist.get_rank(), torch.tensor([float(dist.get_rank())])
    if me == 0:
        found = [torch.zeros(1) for _ in range(2)]
        for each in found:
            dist.recv(each, None, group)
        with pytest.raises(dist.DistBackendError, match=r"has left the group; recv of 4 bytes .* from any"):
            dist.recv(torch.zeros(1), None, group)
        return [each.item() for each in found]
    if me == 2:
        time.sleep(0.5)  # rank 0 looks around meanwhile
    dist.send(data, 0, group)
    dist.destroy_process_group(group)
    return []


@pytest.mark.parametrize("hosts", [1, 3])
def test_a_message_of_any_rank_comes_though_another_has_left(world_pool: WorldPool, hosts: int) -> None:
    assert world_pool.run(3, on_hosts, hosts, from_any_rank)[0] == [1.0, 2.0]


def leavings() -> tuple[int, int, int]:
    """Open files, mappings of shared memory and threads, before and after a group that did everything."""

    def count() -> tuple[int, int, int]:
        with open("/proc/self/maps") as maps:
            shared = sum("memfd:shardwise" in line for line in maps)
        return len(os.listdir("/proc/self/fd")), shared, len(os.listdir("/proc/self/task"))

    engine.load_engine()
    gc.collect()  # broken groups of earlier tests, which their errors' tracebacks hold
    before = count()
    group = engine_group()
    for kind in KINDS:
        operate(kind, group)
    operate("all_reduce", group, LARGE)
    dist.all_reduce(torch.ones(3), group=group, async_op=True).wait()
    during = count()
    dist.destroy_process_group(group)
    del group
    deadline = time.monotonic() + 10
    # A joined thread is in /proc until the kernel has taken it away.
    while (after := count())[2] > before[2] and time.monotonic() < deadline:
        time.sleep(0.001)
    assert during[1] == before[1] + 1 and during[2] > before[2]
    return tuple(b - a for a, b in zip(before, after))  # type: ignore[return-value]


def test_nothing_is_left_of_a_destroyed_group(world_pool: WorldPool) -> None:
    for files, mappings, threads in world_pool.run(3, leavings):
        assert (mappings, threads) == (0, 0) and files <= 0


def without_memory() -> str:
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        engine_group()
    except dist.DistBackendError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return ""


def test_memory_that_cannot_be_had_is_told_on_every_rank(world_pool: WorldPool) -> None:
    for told in world_pool.run(2, without_memory):
        assert "no shared memory of" in told and "File too large" in told
