"""Faults of a network, in network namespaces: links that are cut or slow, hosts that stop, ranks that die elsewhere.

Needs root, so it is for machines of one's own; elsewhere `test_engine_hosts.py` has what loopback connections can show.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cluster import Cluster, cluster, obstacle
from shardwise.collectives import engine

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 6.0
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(obstacle()), reason=obstacle() or "there can be one")]

Ranks = list["subprocess.Popen[str]"]


@pytest.fixture
def hosts() -> Iterator[Cluster]:
    engine.build()
    with cluster(hosts=2) as made:
        yield made
    left = subprocess.run(["ip", "link", "show"], capture_output=True, text=True).stdout
    assert (
        made.name not in left
        and made.name not in subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout
    )


def started(made: Cluster, size: int = 1 << 20) -> tuple[Ranks, list[int]]:
    """Ranks that have done their first round, and their processes' numbers."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "tests.collectives.cluster_program", str(size), str(TIMEOUT)]
    ranks = made.start_ranks(command, {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore"})
    return ranks, [_ready(rank) for rank in ranks]


def _ready(rank: subprocess.Popen[str]) -> int:
    assert rank.stdout is not None
    said = []
    for line in rank.stdout:
        said.append(line)
        if line.startswith("ready "):
            return int(line.split()[1])
    raise AssertionError("".join(said))


def told(ranks: Ranks) -> list[dict[str, Any]]:
    """What each rank was told; every one closed all of its connections."""
    answers = [json.loads(rank.communicate(timeout=60)[0].splitlines()[-1]) for rank in ranks]
    assert max(answer["sockets"] for answer in answers) <= 0, "Gloo may have closed some of its own"
    return answers


def test_a_cut_link_is_noticed_on_both_sides(hosts: Cluster) -> None:
    ranks, _ = started(hosts)
    cut = time.time()
    hosts.cut(1)
    for rank, answer in enumerate(told(ranks)):
        others = ("rank 2", "rank 3") if rank < 2 else ("rank 0", "rank 1")
        assert "cannot be reached any more" in answer["error"] and any(other in answer["error"] for other in others)
        assert answer["when"] - cut < 2 + 1, "2 s, and one for a loaded machine"


def test_a_throttled_link_ends_in_the_timeout(hosts: Cluster) -> None:
    ranks, _ = started(hosts, size=16 << 20)
    for host in range(2):
        hosts.limit(host, 1_000_000)
    for answer in told(ranks):
        assert "timed out after" in answer["error"] or "cannot be reached any more" in answer["error"]
        assert answer["after"] < TIMEOUT + 2


def test_a_rank_killed_on_another_host_is_named(hosts: Cluster) -> None:
    ranks, processes = started(hosts)
    killed = time.time()
    os.kill(processes[3], signal.SIGKILL)
    for answer in told(ranks[:3]):
        assert f"rank 3 (process {processes[3]}" in answer["error"] and "has died" in answer["error"]
        assert answer["when"] - killed < 2


def test_a_rank_stopped_on_another_host_is_named(hosts: Cluster) -> None:
    ranks, processes = started(hosts)
    os.kill(processes[3], signal.SIGSTOP)
    try:
        for answer in told(ranks[:3]):
            # Rank 2, which waits for it on its host, may be missing to the others too.
            assert re.search(r"timed out after 6\.0 s: missing (rank 2 \(.*\); )?rank 3 \(last call", answer["error"])
            assert answer["after"] < TIMEOUT + 2
    finally:
        os.kill(processes[3], signal.SIGCONT)
    assert "missing rank 3" in told(ranks[3:])[0]["error"]
