"""Hosts that come and go, on one address: their launchers meet, part and meet again."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from signal import SIGTERM
from typing import TypeVar

import pytest

from shardwise.errors import MachineError, WorkerError
from shardwise.launch import elastic_round
from shardwise.launch.elastic_hosts import NEW_ROUND, PAUSED, ElasticHosts, failed_outcome, is_pause
from shardwise.launch.hosts import HostEnvironment
from tests.fork_server import Fork, started
from tests.launch.elastic_cluster import JOB, MODULE
from tests.launch.named_hosts import wait_until
from tests.launch.test_host_runs import free_port

Result = TypeVar("Result")
SECONDS = 60


def host(index: int, port: int, hosts: int = 2) -> HostEnvironment:
    return HostEnvironment(index, hosts, 1, "127.0.0.1", port, "the test", least_hosts=1, join_seconds=SECONDS)


def at_once(*calls: Callable[[], Result]) -> list[Result]:
    with ThreadPoolExecutor() as threads:
        return [future.result(SECONDS) for future in [threads.submit(call) for call in calls]]


def test_hosts_meet_part_and_meet_again() -> None:
    port = free_port()
    with ElasticHosts(host(0, port), 0) as first, ExitStack() as others:
        second = others.enter_context(ElasticHosts(host(1, port), 0))
        rounds = at_once(first.next_round, second.next_round)
        assert rounds[0] == rounds[1] and [*rounds[0].members] == [0, 1] and not rounds[0].goes_on
        places = [hosts.place_in(rounds[0]) for hosts in (first, second)]
        assert [(place.index, place.hosts, place.master_port) for place in places] == [
            (0, 2, rounds[0].port),
            (1, 2, rounds[0].port),
        ]
        met = at_once(*(hosts.rendezvous(rounds[0]).next_rendezvous for hosts in (first, second)))
        assert [(one.rank, one.world_size) for one in met] == [(0, 2), (1, 2)]
        met[0].store.set("said", "by host 0")
        assert met[1].store.get("said") == b"by host 0"

        second.report(PAUSED)
        others.close()
        wait_until(lambda: bool(first.interruption), "host 0 hears of it")
        assert first.interruption == "host 1 is gone"
        first.report(failed_outcome(WorkerError("a peer is lost")), snapshots=(4,))
        alone = first.next_round()
        assert ([*alone.members], alone.goes_on, alone.reason, alone.snapshot) == ([0], True, "host 1 is gone", 4)
        assert first.rendezvous(alone).next_rendezvous().world_size == 1

        returned = others.enter_context(ElasticHosts(host(1, port), 0))
        wait_until(first.request_file.exists, "host 0 is told to stop for another")
        reason = first.request_file.read_text()
        assert reason.startswith(NEW_ROUND) and "host 1" in reason and is_pause(reason)
        first.report(PAUSED)
        again = at_once(first.next_round, returned.next_round)
        assert again[0] == again[1] and [*again[0].members] == [0, 1] and again[0].number > alone.number
        assert not first.request_file.exists()


def test_an_error_of_one_host_ends_the_run_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic_round, "PATIENCE", 2.0)  # for a host that is lost and has not been missed yet
    port = free_port()
    with ElasticHosts(host(0, port), 0) as first, ElasticHosts(host(1, port), 0) as second:
        current = at_once(first.next_round, second.next_round)[0]
        rendezvous = first.rendezvous(current)
        second.report(failed_outcome(MachineError("no room on the disk")))
        wait_until(lambda: bool(first.interruption), "host 0 hears of it")
        with pytest.raises(WorkerError, match="host 1 has failed"):
            rendezvous.next_rendezvous()
        first.report(PAUSED)
        for hosts in (first, second):
            with pytest.raises(MachineError, match="no room on the disk"):
                hosts.next_round()


def test_host_0_that_is_not_there_is_named() -> None:
    absent = HostEnvironment(1, 2, 1, "127.0.0.1", free_port(), "the test", least_hosts=1, join_seconds=1.0)
    with ElasticHosts(absent, 0) as hosts, pytest.raises(WorkerError, match=r"host 0 does not answer at 127\.0\.0\.1"):
        hosts.next_round()


def test_an_address_that_host_0_cannot_have_is_named() -> None:
    port = free_port()
    taken = f"host 0 cannot be met at 127.0.0.1:{port}"
    with ElasticHosts(host(0, port), 0), pytest.raises(MachineError, match=re.escape(taken)):
        ElasticHosts(host(0, port), 0).__enter__()


def started_training(directory: Path, index: int, port: int) -> AbstractContextManager[Fork]:
    """Run `shardwise train` on one of two hosts that come and go."""
    data = JOB["data"] | {"cache_directory": str(directory / f"cache-{index}")}
    parallel = JOB["parallel"] | {"sharded_data_parallel_degree": 1}
    more = {
        "data": data,
        "parallel": parallel,
        "training": JOB["training"] | {"steps": 40},
        "output": str(directory / "run"),
    }
    job = directory / f"job-{index}.yaml"
    job.write_text(json.dumps(JOB | {"checkpoint": {"every": 5, "memory_every": 1}} | more))  # JSON is YAML
    variables = {
        "PET_NNODES": "1:2", "PET_NODE_RANK": str(index), "PET_NPROC_PER_NODE": "1",
        "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port),
    }  # fmt: skip
    return started("-m", "shardwise", "train", job, cwd=directory, env=os.environ | variables)


def _steps(records: Path) -> int:
    return records.read_text().count('"loss"') if records.exists() else 0


def test_a_run_goes_on_without_a_host_that_is_told_to_stop(tmp_path: Path) -> None:
    (tmp_path / "points.py").write_text(MODULE)
    (tmp_path / "slow").write_text("0.05")
    records, port = tmp_path / "run" / "metrics.jsonl", free_port()
    with ExitStack() as stack:
        hosts = [stack.enter_context(started_training(tmp_path, index, port)) for index in range(2)]
        wait_until(lambda: _steps(records) >= 3 or any(one.poll() is not None for one in hosts), "two hosts train")
        if hosts[1].poll() is None:
            hosts[1].send_signal(SIGTERM)
        (tmp_path / "slow").unlink()
        ends = [one.communicate() for one in hosts]
        assert [one.wait() for one in hosts] == [0, 128 + SIGTERM], ends
    assert "the run goes on with 1 of 2 hosts" in ends[0][0], ends
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [*range(1, 41)]
