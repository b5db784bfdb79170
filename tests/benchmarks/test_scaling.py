"""The simulation of a step by events: what its rings, its direct sending and its slow hosts take; the page's table."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks import scaling
from benchmarks.scaling_events import Clock, Direct, Host, Machines, Ring, Step, StepWork, simulated_seconds, slowness
from shardwise.planner.published import accuracy

PAGE = Path("docs/explanations/planner.md")
SIMULATED = 2  # cells at the end of a row that the simulation gives
IDLE = StepWork(3, 0.0, 0.0, 0.0, 0.0, 64e6, 64e6, 0.0, 0.0)  # nothing but the traffic of three blocks
MACHINES = Machines(4, 2, 100, 1e9, 2e9, 8e9, 0.0, 0.0, channels=2, shard=8)
WHOLE = scaling.Series("llama2-70b", scaling.P5, 0, "nccl", 2)


def joined(collective: Ring | Direct, hosts: list[Host], clock: Clock, late: float = 0.0) -> list[float]:
    """Return when each host is done where the first one joins late."""
    ends = [0.0] * len(hosts)

    def leave(place: int) -> None:
        ends[place] = clock.now

    for place in range(len(hosts)):
        begin = collective.join(place)
        clock.at(0.0 if place else late, lambda begin=begin, place=place: begin(lambda: leave(place)))
    clock.run()
    return ends


def some_hosts(number: int) -> tuple[Clock, list[Host]]:
    clock = Clock()
    return clock, [Host(clock, 1.0, 100) for _ in range(number)]


def test_a_ring_takes_its_steps_and_waits_for_who_is_late() -> None:
    clock, hosts = some_hosts(4)
    assert joined(Ring(clock, hosts, 3, 2.0, 0.5, 0.25), hosts, clock) == pytest.approx([6.25] * 4)  # and a last hop
    clock, hosts = some_hosts(4)
    assert joined(Ring(clock, hosts, 3, 2.0, 2.0, 1.0), hosts, clock) == pytest.approx([9.0] * 4)  # nothing in between
    clock, hosts = some_hosts(4)
    late = joined(Ring(clock, hosts, 3, 2.0, 0.5, 0.25), hosts, clock, late=10.0)
    assert late == pytest.approx([16.0, 16.25, 15.0, 13.75])  # the last sends all three behind each other


def test_direct_sending_takes_its_parts_or_its_copies() -> None:
    clock, hosts = some_hosts(4)
    assert joined(Direct(clock, hosts, 2.0, 1.0, 0.5), hosts, clock) == pytest.approx([6.5] * 4)
    clock, hosts = some_hosts(4)
    assert joined(Direct(clock, hosts, 2.0, 9.0, 0.5), hosts, clock) == pytest.approx([9.0] * 4)


def test_kernels_are_slower_beside_collectives_and_on_slow_hosts() -> None:
    clock = Clock()
    host, ends = Host(clock, 1.5, 100), []
    clock.at(0.0, lambda: host.processor.kernel(4.0)(lambda: ends.append(clock.now)))
    clock.at(1.0, lambda: host.processor.hold(50))
    clock.at(5.0, lambda: host.processor.hold(-50))
    clock.run()
    assert ends == [pytest.approx(8.0)]  # 6 of a slow host, of which half as many in four seconds


def test_traffic_alone_is_gathered_twice_and_scattered_once() -> None:
    """Four hosts of two ranks: three quarters of each block leave a host, by rings or directly at twice the rate."""
    block = 0.75 * 64e6 / 1e9
    rings = simulated_seconds(IDLE, MACHINES, 1)
    assert rings == pytest.approx(9 * block, rel=0.2)
    direct = simulated_seconds(IDLE, MACHINES._replace(direct=True), 1)
    assert direct == pytest.approx(6 * block / 2 + 3 * block, rel=0.35) and direct < rings


def test_rings_are_as_long_as_measured() -> None:
    """All-gathers of 256 MB on p5 nodes, of fabric_bandwidth.csv: nodes -> GB/s."""
    departures = []
    for nodes, speed in {2: 184.6, 4: 119.0, 8: 69.0, 16: 55.0, 32: 28.0, 64: 11.0}.items():
        step = Step(*scaling.as_events(WHOLE.configuration(nodes)), seed=1)
        for begin in step.ring(256e6):
            begin(lambda: None)
        step.clock.run()
        measured = 256e6 * (1 - 1 / (8 * nodes)) / speed / 1e9
        departures.append(math.log(step.clock.now / measured))
    assert math.sqrt(sum(each**2 for each in departures) / 6) < 0.16


def test_a_step_of_kernels_alone_is_as_long_as_its_slowest_host() -> None:
    work = StepWork(5, 1.0, 3.0, 2.0, 0.5, 0.0, 0.0, 0.0, 0.0)
    slowest = max(slowness(4, 2, seed=7))
    assert simulated_seconds(work, MACHINES, 7) == pytest.approx(22.5 * slowest)
    assert slowest > 1.0 and slowness(4, 2, seed=8) != slowness(4, 2, seed=7)


def test_replicas_reduce_shards_behind_the_scattering() -> None:
    alone = simulated_seconds(IDLE, MACHINES, 1)
    copied = simulated_seconds(IDLE, MACHINES._replace(shard=4), 1)
    assert copied != pytest.approx(alone, rel=0.01)
    more = simulated_seconds(IDLE, MACHINES._replace(shard=4, hosts=8), 1)
    assert more > copied


def test_the_page_has_the_closed_forms_curve() -> None:
    shown = [line.split(" | ")[:-SIMULATED] for line in accuracy.part(PAGE.read_text(), "scaling").splitlines()]
    made = scaling.markdown(scaling.scaling(simulate=False)).splitlines()
    assert [line.split(" | ")[:-SIMULATED] for line in made] == shown


def test_the_page_says_that_both_agree() -> None:
    """All but where NCCL gathers over all ranks of p4d, as the page says."""
    lines = accuracy.part(PAGE.read_text(), "scaling").splitlines()[2:]
    assert len(lines) == len(scaling.SERIES)
    apart = [line for line in lines if abs(float(line.split(" | ")[-1].removesuffix(" |"))) > 5.0]
    assert [line.split(" | ")[:4] for line in apart] == [["| 70B", "p4d", "all", "NCCL"]]


def test_both_agree_on_a_few_nodes() -> None:
    hybrid = scaling.Series("llama2-7b", scaling.P5, 8, "nccl", 4)
    assert abs(scaling.point(hybrid.configuration(2)).departure) < 0.05


@pytest.mark.slow
@pytest.mark.timeout(3600)  # a hundred million events
def test_the_page_has_what_the_simulation_gives() -> None:
    assert accuracy.part(PAGE.read_text(), "scaling") == scaling.markdown(scaling.scaling())
