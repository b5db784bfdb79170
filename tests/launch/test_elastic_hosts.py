"""Hosts that come and go under our own launcher: batch, samples and losses stay those of an undisturbed run."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from benchmarks.cluster import obstacle
from tests.launch import named_hosts
from tests.launch.elastic_cluster import ElasticCluster, elastic_cluster, records_of

SECONDS = 1200  # for what takes one on a quiet machine: each round imports torch
needs_namespaces = pytest.mark.skipif(bool(obstacle()), reason=obstacle() or "there can be hosts")


def shared_files() -> set[str]:
    """Return what lies in /dev/shm but Python's semaphores, which last a moment, of any process."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


def wait_until(cluster: ElasticCluster, holds: Callable[[], bool], what: str) -> None:
    """Wait for the hosts, and say what they said where it does not come true."""
    named_hosts.wait_until(holds, what, cluster.logs, SECONDS)


def check_same_run(cluster: ElasticCluster) -> None:
    """The records are those of one rank that was left alone: no step twice, none lost, the same samples and losses."""
    expected, records = records_of(cluster.undisturbed()), cluster.records()
    assert [record["step"] for record in records] == [record["step"] for record in expected], cluster.logs()
    assert [record["data_hash"] for record in records] == [record["data_hash"] for record in expected]
    assert [record["tokens"] for record in records] == [record["tokens"] for record in expected]
    for key in ("loss", "grad_norm"):
        assert [record[key] for record in records] == pytest.approx([record[key] for record in expected], rel=1e-9)


@pytest.mark.timeout(1500)
@pytest.mark.slow  # some twenty processes import torch
@needs_namespaces
def test_a_host_goes_away_and_comes_back(tmp_path: Path) -> None:
    with elastic_cluster(tmp_path, steps=200) as cluster:
        for host in range(3):
            cluster.start(host)
        wait_until(cluster, lambda: cluster.ranks().count(3) >= 12, "three hosts train")
        cluster.kill(2)
        wait_until(cluster, lambda: cluster.ranks().count(2) >= 5, "two go on")
        cluster.start(2)
        wait_until(cluster, lambda: cluster.ranks()[-1] == 3, "it joins")
        assert [cluster.hosts[host].wait(timeout=300) for host in range(3)] == [0, 0, 0], cluster.logs()
        check_same_run(cluster)
        log = cluster.log(0).read_text()
        assert "a step has 3 sequences" in log
        assert "host 2 is gone: the run goes on with 2 of 3 hosts" in log
        assert "host 2 joins: the run goes on with 3 of 3 hosts" in log


KEPT: dict[str, Any] = {"checkpoint": {"every": 25, "memory_every": 1}, "parallel": {"sharded_data_parallel_degree": 1}}
NO_DISK = {"every": 0, "memory_every": 1}
ALL_THERE = "the run goes on with 3 of 3 hosts"
SAID = re.compile(r"^step (\d+)/|^resumed from (\S.*)/step-0*(\d+): ", re.MULTILINE)


def steps_again(log: str) -> list[tuple[str, int]]:
    """Each time that host 0 went on: from where, and how many steps it did again."""
    resumed_from, last = [], 0
    for step, source, resumed in SAID.findall(log):
        if source:
            resumed_from.append((source, last - int(resumed)))
        last = int(step or resumed)
    return resumed_from


def lose_and_return(cluster: ElasticCluster, host: int, more_steps: int) -> None:
    """Kill a host after so many steps of all three, and start it again; without host 0 the others wait for it."""
    wait_until(cluster, lambda: cluster.ranks()[-1:] == [3], "three hosts train")
    seen, rounds = len(cluster.ranks()) + more_steps, cluster.log(0).read_text().count(ALL_THERE)
    wait_until(cluster, lambda: len(cluster.ranks()) >= seen, "some steps are done")
    cluster.kill(host)
    if host:
        wait_until(cluster, lambda: cluster.ranks()[-1:] == [2], "two go on")
    cluster.start(host)
    wait_until(cluster, lambda: cluster.log(0).read_text().count(ALL_THERE) > rounds, "it is back")


@pytest.mark.timeout(3600)
@pytest.mark.slow  # some fifteen processes import torch
@needs_namespaces
def test_hosts_go_on_from_their_memory(tmp_path: Path) -> None:
    """Without a checkpoint on disk; and no host leaves anything behind."""
    before = shared_files()
    with elastic_cluster(tmp_path, steps=40, slow=0.1, **KEPT | {"checkpoint": {"memory_every": 1}}) as cluster:
        for host in range(3):
            cluster.start(host)
        wait_until(cluster, lambda: len(cluster.ranks()) >= 7, "three hosts train")
        cluster.kill(1)
        wait_until(cluster, lambda: cluster.ranks()[-1:] == [2], "two go on")
        cluster.hurry()
        assert [cluster.hosts[host].wait(timeout=SECONDS) for host in (0, 2)] == [0, 0], cluster.logs()
        check_same_run(cluster)
        again = steps_again(cluster.log(0).read_text())
        assert [(source, steps <= 1) for source, steps in again] == [("memory of this host", True)], cluster.logs()
        assert not (cluster.output / "checkpoints" / "step-00000005").exists()
    assert shared_files() == before


@pytest.mark.timeout(3600)
@pytest.mark.slow  # some fifteen processes import torch
@needs_namespaces
def test_host_0_comes_back_and_goes_on_from_the_others_memory(tmp_path: Path) -> None:
    """Without a checkpoint on disk: what it held itself is lost."""
    with elastic_cluster(tmp_path, steps=40, slow=0.1, **KEPT | {"checkpoint": NO_DISK}) as cluster:
        for host in range(3):
            cluster.start(host)
        wait_until(cluster, lambda: len(cluster.ranks()) >= 7, "three hosts train")
        cluster.kill(0)
        cluster.start(0)
        wait_until(cluster, lambda: cluster.log(0).read_text().count(ALL_THERE) > 0, "it is back")
        cluster.hurry()
        assert [cluster.hosts[host].wait(timeout=SECONDS) for host in range(3)] == [0, 0, 0], cluster.logs()
        check_same_run(cluster)
        log = cluster.log(0).read_text()
        assert [(source, steps <= 1) for source, steps in steps_again(log)] == [("memory of this host", True)], log
        assert "from the memory of rank 1 to that of rank 0" in log
        assert not list((cluster.output / "checkpoints").glob("step-*"))


@pytest.mark.timeout(7200)
@pytest.mark.slow  # a hundred processes import torch
@needs_namespaces
def test_ten_kills(tmp_path: Path) -> None:
    """Hosts that a seed draws are killed in any phase and come back; each goes on from the memory of those left."""
    draw, victims = Random(35), list[int]()
    before = shared_files()
    with elastic_cluster(tmp_path, steps=1000, slow=0.4, **KEPT) as cluster:
        for host in range(3):
            cluster.start(host)
        for _ in range(10):
            victims.append(draw.randrange(3))
            lose_and_return(cluster, victims[-1], more_steps=draw.randrange(6))
        wait_until(cluster, lambda: cluster.ranks()[-1:] == [3], "three hosts train")
        cluster.hurry()
        assert [cluster.hosts[host].wait(timeout=900) for host in range(3)] == [0, 0, 0], cluster.logs()
        check_same_run(cluster)
        again = steps_again(cluster.log(0).read_text())
    from_memory = [steps for source, steps in again if source.startswith("memory")]
    assert len(from_memory) >= len(victims) and max(from_memory) <= 1, again
    assert {0, 1, 2} == set(victims)
    assert shared_files() == before
