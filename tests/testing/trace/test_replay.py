"""A replayed program takes the seconds that its streams take side by side, and is written for Perfetto."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from shardwise.job.axes import Axis
from shardwise.parallel.layout import Layout
from shardwise.planner.constants.inventory import cluster
from shardwise.planner.formulas.compute import matmul_seconds
from shardwise.testing.trace.agreement import Program
from shardwise.testing.trace.kinds import ranks_of_kinds
from shardwise.testing.trace.program import (
    HOST_WAITS,
    RECEIVE,
    SEND,
    THREAD_WAITS,
    Call,
    Copy,
    CopyWait,
    Entry,
    HostWork,
    Joined,
    Operators,
    Read,
    Wait,
)
from shardwise.testing.trace.replay import COMPUTATION, Replay
from shardwise.testing.trace.roofline import Roofline
from shardwise.testing.trace.work import work_of

PARTITIONS = (((0, 1),), ((0,), (1,)), ((0, 2), (1, 3)))  # stages; none; shards, of which one is replayed
LAUNCH, COLLECTIVE = 0.5, 3.0


class Seconds(Roofline):
    """Operators take the seconds that stand in their work, collectives three, launches half a second."""

    def beside_seconds(self, computation: float, traffic: float) -> float:
        return max(computation, traffic)

    def __init__(self) -> None:
        pass

    def device_seconds(self, operators: Operators) -> float:
        return sum(operators.work.values())

    def host_seconds(self, operators: Operators) -> float:
        return LAUNCH * operators.launches

    def copy_seconds(self, size: int) -> float:
        return size

    def host_memory_seconds(self, size: int) -> float:
        return size

    def call_seconds(self, call: Call, members: Sequence[int]) -> float:
        return COLLECTIVE


def compute(seconds: int, phase: str = "forward") -> Operators:
    return Operators(phase, 1, {("bytes",): seconds})


def call(number: int, operation: str, partition: int, **more: Any) -> Call:
    return Call(number, operation, "group", partition, 8, "", "", "line", **more)


def replay(*programs: list[Entry]) -> Replay:
    world = Replay({rank: Program(entries, PARTITIONS) for rank, entries in enumerate(programs)}, Seconds())
    world.run()
    return world


def test_a_collective_is_beside_what_does_not_wait_for_it() -> None:
    blocking: list[Entry] = [compute(2), call(0, "all_reduce", 2), Wait(0), compute(4)]
    ahead: list[Entry] = [compute(2), call(0, "all_reduce", 2), compute(4), Wait(0)]
    assert replay(blocking).seconds == 2 + 3 + 4
    assert replay(ahead).seconds == 2 + 4
    assert replay(blocking).clocks[0].collectives == 3 and replay(ahead).clocks[0].collectives == 0


def test_a_gathered_unit_is_waited_for_where_it_is_used() -> None:
    def gather(number: int) -> list[Entry]:
        return [call(number, "all_gather", 2, is_apart=True), Wait(number)]

    entries = [*gather(0), Wait(0, at_use=True), *gather(1), compute(5), Wait(1, at_use=True), compute(5)]
    assert replay(entries).seconds == 3 + 5 + 5  # the second is gathered beside the first's computation
    reduced: list[Entry] = [compute(1), call(0, "reduce_scatter", 2, is_apart=True), Wait(0), compute(1, "update")]
    assert replay(reduced).seconds == 1 + 3 + 1


def test_stages_wait_for_messages() -> None:
    first: list[Entry] = [compute(2), call(0, SEND, 0, peer=1, batch=1), compute(1), Wait(0)]
    second: list[Entry] = [call(0, RECEIVE, 0, peer=1, batch=1), Wait(0), compute(2, "backward")]
    world = replay(first, second)
    assert world.seconds == 2 + 3 + 2
    assert world.clocks[1].messages == 5 and world.clocks[1].worked.own == 2


def test_what_comes_behind_the_last_backward_is_no_microbatch_s() -> None:
    """A gradient that all ranks sum, which the slower one holds up, and its copies; not a weight's product put off."""
    end: list[Entry] = [call(0, "all_reduce", 0), Wait(0), compute(1), compute(1, "update")]
    late = Operators("forward", 1, {("product", 1, 1, 1): 2})
    world = replay([compute(2), compute(4, "backward"), late, *end], [compute(1), compute(1, "backward"), *end])
    assert world.seconds == 8 + 3 + 1 + 1
    assert [clock.worked.own for clock in world.clocks.values()] == [8, 2]
    assert world.clocks[1].collectives == 9 and world.clocks[1].worked.collectives == 0


def test_a_reduction_once_a_step_is_no_microbatch_s_either() -> None:
    reduced = Operators("reduction", 1, {("bytes",): 8}, once=True)
    world = replay([compute(2), compute(4, "backward"), reduced, compute(4, "backward"), compute(1, "update")])
    assert world.seconds == 2 + 4 + 8 + 4 + 1
    assert world.clocks[0].worked.own == 18 and world.clocks[0].worked.again == 10


def test_a_slow_host_is_the_limit_and_a_read_makes_it_wait() -> None:
    slow: list[Entry] = [Operators("forward", 20, {("bytes",): 1})]
    assert replay(slow).seconds == 20 * LAUNCH
    entries: list[Entry] = [compute(4), Read("step.py:1"), compute(4)]
    world = replay(entries)
    assert world.seconds == 8
    assert [piece.start for piece in world.slices if piece.stream == COMPUTATION] == [0, 4]
    assert world.clocks[0].host == 4 + LAUNCH


def copied(stream: int, number: int, seconds: int, waits: bool = False) -> Copy:
    return Copy(seconds, True, stream, number, waits)


def test_a_copy_is_beside_computation_on_a_stream_of_its_own() -> None:
    after = CopyWait(1, ((0, 0), (1, 0)))  # the stream comes after what is computed
    beside: list[Entry] = [compute(2), after, copied(1, 1, 3), compute(4)]
    assert replay(beside).seconds == 2 + 4
    waited: list[Entry] = [compute(2), after, copied(1, 1, 3), CopyWait(0, ((1, 1),)), compute(4)]
    assert replay(waited).seconds == 2 + 3 + 4
    on_it: list[Entry] = [compute(2), copied(0, 1, 3), compute(4)]
    assert replay(on_it).seconds == 2 + 3 + 4
    blocking: list[Entry] = [copied(0, 1, 3, waits=True), compute(4)]
    assert replay(blocking).clocks[0].host == 3 + LAUNCH


def test_a_copy_of_what_is_reduced_comes_after_the_reduction() -> None:
    reduction = call(0, "reduce_scatter", 2, is_apart=True)
    entries: list[Entry] = [compute(1), reduction, Wait(0), CopyWait(1, ((2, 0), (0, 0))), copied(1, 1, 2)]
    assert replay(entries).seconds == 1 + 3 + 2


def test_updates_in_host_memory_take_the_host_s_time_or_its_thread_s() -> None:
    copy = copied(1, 1, 2)
    own: list[Entry] = [copy, CopyWait(HOST_WAITS, ((1, 1),)), HostWork(5), compute(1)]
    assert replay(own).seconds == 2 + 5 + 1 and replay(own).clocks[0].hosting == 5
    thread: list[Entry] = [copy, CopyWait(THREAD_WAITS, ((1, 1),)), HostWork(5, beside=True), compute(6)]
    assert replay(thread).seconds == max(2 + 5, 6)
    assert replay([*thread, Joined(), compute(1)]).seconds == 2 + 5 + 1


def test_products_take_what_the_planner_says_and_the_rest_its_bytes() -> None:
    roofline = Roofline.of(cluster("dgx-h100:1"), "bf16")
    product = Operators("forward", 2, {("product", 512, 1024, 2048): 2})
    assert roofline.device_seconds(product) == 2 * matmul_seconds(512, 1024, 2048, roofline.rates)
    assert roofline.device_seconds(Operators("forward", 1, {("bytes",): 10**9})) == 10**9 / roofline.rates.bandwidth
    near, far = (call(0, "all_reduce", 0)._replace(bytes=2**28) for _ in range(2))
    assert roofline.call_seconds(near, range(4)) > 0 == roofline.call_seconds(far, [0])


@pytest.mark.parametrize(
    ("degrees", "ranks"),
    [
        ({Axis.TENSOR: 1}, [0]),
        ({Axis.TENSOR: 2}, [0, 1]),
        ({Axis.TENSOR: 4, Axis.SHARD: 2}, [0, 1, 3, 4]),
        ({Axis.TENSOR: 2, Axis.PIPELINE: 2, Axis.REPLICA: 2}, [0, 1, 2, 3, 4, 6]),
    ],
)
def test_one_rank_of_every_kind_is_traced(degrees: dict[Axis, int], ranks: list[int]) -> None:
    assert sorted(ranks_of_kinds(Layout(degrees)).values()) == ranks


def test_attention_is_half_where_the_kernel_is_told_that_it_is_causal() -> None:
    """Defaults are left out of what is dispatched; of the efficient kernel's switches another one comes before it."""
    q, k = torch.empty(1, 2, 8, 16, device="meta"), torch.empty(1, 2, 32, 16, device="meta")
    whole = 4 * 2 * 8 * 32 * 16

    def thousands(name: str, *args: Any) -> int:
        work = work_of(getattr(torch.ops.aten, name).default, args, {}, q)
        assert work is not None and work[0][0] == "attention"
        return int(work[0][1])

    efficient, flash = "_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention"
    assert thousands(efficient, q, k, k, None, True, 0.0) == round(whole / 1000)
    assert thousands(efficient, q, k, k, None, True, 0.0, True) == round(whole / 2000)
    assert thousands(flash, q, k, k) == round(whole / 1000)
    assert thousands(flash, q, k, k, 0.0, True) == round(whole / 2000)
    backward = (q, q, k, k, None, q, q, q, q, 0.0, [True, True, True, False])
    assert thousands(f"{efficient}_backward", *backward, True) == round(2.5 * whole / 2000)
