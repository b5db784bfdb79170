"""The engine between hosts: ranks of this machine that take themselves for several, over loopback connections."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from shardwise.collectives import engine, registration
from shardwise.collectives.topology import HOST_VARIABLE
from shardwise.testing.world import WorldError, WorldPool
from tests.collectives.test_engine import fuzz, messages, numbers, special_cases
from tests.collectives.test_engine_faults import COUNT, KINDS, disagree, engine_group, killed_in, leave_early, stopped


def spread(hosts: int, function: Callable[..., Any], *args: Any) -> Any:
    """`function` on ranks dealt out to `hosts` hosts in turn."""
    os.environ[HOST_VARIABLE] = f"host {dist.get_rank() % hosts}"
    try:
        return function(*args)
    finally:
        del os.environ[HOST_VARIABLE]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("world", "hosts", "rounds"), [(4, 2, 100), (3, 3, 60)])
def test_random_operations_over_random_groups(world_pool: WorldPool, world: int, hosts: int, rounds: int) -> None:
    assert world_pool.run(world, spread, hosts, fuzz, 20261122, rounds) == [rounds] * world


@pytest.mark.slow
@pytest.mark.parametrize(("world", "hosts"), [(2, 2), (3, 2), (6, 2), (8, 4), (5, 5), (7, 4)])
def test_many_random_operations(world_pool: WorldPool, world: int, hosts: int) -> None:
    assert world_pool.run(world, spread, hosts, fuzz, 9 * world, 1000, timeout=290) == [1000] * world


def test_messages_and_what_the_fuzz_does_not_reach(world_pool: WorldPool) -> None:
    world_pool.run(3, spread, 2, messages)
    world_pool.run(2, spread, 2, special_cases)


def bits() -> bytes:
    registration.register()
    group = dist.new_group(backend="shardwise")
    data = numbers(5, dist.get_rank(), 100_001, torch.bfloat16)
    dist.all_reduce(data, group=group)
    return data.view(torch.int16).numpy().tobytes()


@pytest.mark.parametrize("world", [3, 4])
def test_sums_have_the_same_bits_on_all_ranks_and_runs(world_pool: WorldPool, world: int) -> None:
    assert len({each for _ in range(3) for each in world_pool.run(world, spread, 2, bits)}) == 1


@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if k == "all_gather" else pytest.mark.slow) for k in KINDS])
def test_a_killed_rank_is_named_on_every_host(world_pool: WorldPool, kind: str) -> None:
    with pytest.raises(WorldError) as caught:
        world_pool.run(4, spread, 2, killed_in, kind, COUNT, timeout=60)
    reports = caught.value.reports
    assert "SIGKILL" in reports[1].what
    for rank in (0, 2, 3):
        assert "DistBackendError" in reports[rank].what and "rank 1 (process" in reports[rank].text
        assert "has died" in reports[rank].text and reports[rank].when - reports[1].when < 2.5


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("sizes", ("rank 0: all_reduce #1 (10 x float32, sum)", "rank 1: all_reduce #1 (11 x float32, sum)")),
        ("roots", ("root 0)", "root 1)")),
        ("order", ("rank 0: broadcast #1", "rank 1: all_reduce #1")),
        ("names", ("out of step: rank 0: all_reduce #1", "of blocks.0 over shard; rank 1", "of blocks.1 over shard.")),
        ("splits", ("rank 1 sends 20 bytes to rank 0, which expects 20", "expects 16")),
        ("message", ("recv of 40 bytes (tag 0) from rank 0 met a message of rank 0 of another size: 16 bytes",)),
    ],
)
def test_different_calls_are_told_on_every_host(world_pool: WorldPool, case: str, words: tuple[str, ...]) -> None:
    for told in world_pool.run(2, spread, 2, disagree, case):
        if case == "splits":
            assert "sends" in told and "which expects" in told
        else:
            assert all(word in told for word in words), told


def test_a_rank_that_left_is_named(world_pool: WorldPool) -> None:
    told = world_pool.run(2, spread, 2, leave_early)[1]
    assert "rank 0 (process" in told and "has left the group; barrier #1 waits for it" in told


def test_a_stopped_rank_is_named_on_every_host(world_pool: WorldPool) -> None:
    """It may come in time for ranks of its own host, where those of another have given up: the next call tells."""
    for told, seconds in world_pool.run(4, spread, 2, stopped, 2):
        assert "all_reduce #1 (9 x float32, sum) timed out after" in told
        assert "missing rank 1 (last call start #0, heard of" in told
        assert seconds < 3.5


def with_a_stranger() -> int:
    """Rank 0 is called by somebody who talks nonsense while it waits for rank 1. How many such calls there were."""
    calls = 0

    def disturb() -> None:
        nonlocal calls
        before, until = gates(), time.monotonic() + 10
        ready.set()
        while calls < 5 and time.monotonic() < until:
            for port in gates() - before:
                with socket.create_connection(("127.0.0.1", port)) as caller:
                    caller.sendall(b"GET / HTTP/1.1\r\n\r\n" * (1 + 40 * calls))
                calls += 1

    def gates() -> set[int]:
        found = psutil.Process().net_connections("tcp")
        return {each.laddr.port for each in found if each.status == psutil.CONN_LISTEN}

    if dist.get_rank() == 0:
        ready = threading.Event()
        stranger = threading.Thread(target=disturb)
        stranger.start()
        ready.wait()
    towards = engine._towards
    if dist.get_rank() == 1:  # comes late to the gate, once it is known where that is
        engine._towards = lambda store: (time.sleep(1), towards(store))[1]
    try:
        group = engine_group()
    finally:
        engine._towards = towards
    data = torch.ones(100_000)
    dist.all_reduce(data, group=group)
    assert (data == 2).all()
    if dist.get_rank() == 0:
        stranger.join()
    return calls


def test_a_stranger_is_dropped_and_the_run_goes_on(world_pool: WorldPool) -> None:
    assert world_pool.run(2, spread, 2, with_a_stranger)[0] >= 1


def leavings() -> tuple[int, int]:
    """Open files and threads before and after a group that did everything."""

    def count() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    from tests.collectives.test_engine_faults import operate

    engine.load_engine()
    before = count()
    group = engine_group()
    for kind in KINDS:
        operate(kind, group)
    during = count()
    dist.destroy_process_group(group)
    del group
    after = count()
    assert during[0] > before[0] and during[1] > before[1]
    return after[0] - before[0], after[1] - before[1]


def test_nothing_is_left_of_a_destroyed_group(world_pool: WorldPool) -> None:
    for files, threads in world_pool.run(3, spread, 2, leavings):
        assert files <= 0 and threads == 0


def aborted_after_its_end() -> bool:
    group = engine_group()
    dist.all_reduce(torch.ones(4), group=group)
    backend = group._get_backend(torch.device("cpu"))
    backend.shutdown()
    others = [bytearray(size) for size in range(16, 4000, 8) for _ in range(20)]  # memory that the group gave back
    backend.abort()
    backend.abort()
    return not any(map(any, others))


def test_a_group_that_has_ended_may_be_aborted(world_pool: WorldPool) -> None:
    assert world_pool.run(2, spread, 2, aborted_after_its_end) == [True, True]


def without(what: str, rank: int) -> str:
    """Make a group where this rank has no such interface, or no memory."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == rank and what == "interface":
        os.environ[engine.INTERFACE_VARIABLE] = "none0"
    elif dist.get_rank() == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        registration.register()
        dist.new_group(backend="shardwise", timeout=timedelta(seconds=20))
    except dist.DistError as error:
        return str(error)
    finally:
        os.environ.pop(engine.INTERFACE_VARIABLE, None)
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return ""


@pytest.mark.parametrize(
    ("what", "rank", "words"),
    [
        ("interface", 0, "this host has no address on the interface none0"),
        ("interface", 1, "this host has no address on the interface none0"),
        ("interface", 3, "this host has no address on the interface none0"),
        ("memory", 0, "no shared memory of"),
        ("memory", 1, "no shared memory of"),
    ],
)
def test_why_a_rank_takes_no_part_is_told_on_every_host(
    world_pool: WorldPool, what: str, rank: int, words: str
) -> None:
    for told in world_pool.run(4, spread, 2, without, what, rank):
        assert words in told
