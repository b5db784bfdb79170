"""Each thing that is wrong on a host before a long run is a line, and a host in order is none."""

from __future__ import annotations

import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import torch.distributed as dist

from shardwise.errors import OutputError
from shardwise.launch import loopback, preflight
from shardwise.launch.environment import RankEnvironment
from shardwise.launch.host_report import HostReport, gpu_row
from shardwise.launch.preflight import GIB, wrong_things
from shardwise.launch.process_group import ALONE
from shardwise.testing.world import WorldPool

GPU = gpu_row("0, NVIDIA H100 80GB HBM3, 4, 81559, 31, 0, Not Active, Not Active")
WELL = HostReport(
    host="node0",
    versions={"python": "3.12.1", "torch": "2.12.0"},
    clock=1000.0,
    disk_free=900 * GIB,
    disk_total=1000 * GIB,
    disk_rate=2e9,
    memory_available=900 * GIB,
    memory_total=1000 * GIB,
    shared_free=100 * GIB,
    link_promised=12.5e9,
    gpus=[GPU],
)


def exchanged(output: Path) -> list[HostReport]:
    """Exchange reports as hosts of a rank each do."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return preflight._exchange(RankEnvironment(rank, size, 0, 1, loopback.ADDRESS, 0, "torchrun"), output)


def test_hosts_report_what_they_find(world_pool: WorldPool, tmp_path: Path) -> None:
    """The first one gathers it, with what it measures of the link to each; nothing is left in the directory."""
    (first, second), nothing = world_pool.run(2, exchanged, tmp_path / "run")
    assert nothing == [] and not list(tmp_path.iterdir())
    assert first.link_measured == 0 < second.link_measured
    for report in (first, second):
        assert report.versions["torch"] == version("torch")
        assert 0 < report.disk_free <= report.disk_total and report.disk_rate > 0
        assert 0 < report.memory_available <= report.memory_total
        assert abs(report.clock - time.time()) < 60
    (lone,) = preflight._exchange(ALONE, tmp_path)
    assert (lone.host, lone.versions, lone.gpus) == (first.host, first.versions, first.gpus)


def test_an_output_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes").touch()
    with pytest.raises(OutputError, match=r"cannot be made: .*notes is a file"):
        preflight._exchange(ALONE, tmp_path / "notes" / "run")


def test_hosts_in_order_have_no_line() -> None:
    hosts = [replace(WELL, host=f"node{index}", link_measured=9e9 * (index > 0)) for index in range(4)]
    assert list(wrong_things(hosts)) == []


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"versions": {"python": "3.12.1", "torch": "2.11.0"}}, "torch is 2.11.0, 2.12.0 on most hosts"),
        ({"versions": {"python": "3.12.1"}}, "torch is none, 2.12.0 on most hosts"),
        ({"clock": 1003.2}, "its clock is +3.2 s off that of node0"),
        ({"link_measured": 1.2e9}, "1.20 GB/s arrive from node0, its interface promises 12.50"),
        ({"disk_free": 3 * GIB}, "3.0 of 1000 GiB free"),
        ({"disk_rate": 9e6}, "takes 9 MB/s"),
        ({"disk_rate": 0.0}, "cannot be written"),
        ({"memory_available": 100 * GIB}, "100.0 of 1000.0 GiB of memory are free"),
        ({"swap_used": 5 * GIB}, "5.0 GiB lie in swap"),
        ({"shared_free": GIB // 2}, "/dev/shm has 0.50 GiB free"),
        ({"gpus": [[*GPU[:5], "2", *GPU[6:]]]}, "GPU 0 (NVIDIA H100 80GB HBM3) has 2 uncorrected memory errors"),
        ({"gpus": [[*GPU[:6], "Active", GPU[7]]]}, "is slowed down by its hardware"),
        ({"gpus": [[*GPU[:4], "91", *GPU[5:]]]}, "has 91 °C before the run"),
        ({"gpus": [[*GPU[:2], "30000", *GPU[3:]]]}, "holds 30000 MiB of somebody else's"),
    ],
)
def test_what_is_wrong_is_a_line(changes: dict[str, object], line: str) -> None:
    hosts = [WELL, replace(WELL, host="node1", **changes), replace(WELL, host="node2")]
    (said,) = wrong_things(hosts)
    assert said.startswith("node1: ") and line in said
