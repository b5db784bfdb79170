"""The process group's life in one process; several processes are in test_local.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardwise.errors import ConfigError, MachineError
from shardwise.launch import failure, loopback
from shardwise.launch import process_group as process_groups
from shardwise.launch.environment import RankEnvironment
from shardwise.launch.process_group import available_cores, process_group
from shardwise.testing.world import WorldPool

PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in (*PLACE, "GLOO_SOCKET_IFNAME", failure.DIRECTORY_VARIABLE, "OMP_NUM_THREADS"):
        monkeypatch.delenv(key, raising=False)


def test_one_rank_needs_no_launcher_and_leaves_nothing_behind() -> None:
    with process_group("cpu", "gloo") as device:
        total = torch.ones(3, device=device)
        dist.all_reduce(total)
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "gloo")
        assert total.tolist() == [1, 1, 1] and os.environ["GLOO_SOCKET_IFNAME"] == loopback.interface()
    assert not dist.is_initialized() and "GLOO_SOCKET_IFNAME" not in os.environ


def test_an_error_ends_the_group_and_is_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(failure.DIRECTORY_VARIABLE, str(tmp_path))
    for key, value in zip(PLACE, ("0", "1", "0", "1", "127.0.0.1", "1")):
        monkeypatch.setenv(key, value)
    with pytest.raises(ConfigError), process_group("cpu", "gloo"):
        raise ConfigError("training.steps=-1 must be positive; use 1")
    failure.report(ValueError("later"))
    assert not dist.is_initialized()
    assert json.loads((tmp_path / "rank-0.json").read_text())["message"].startswith("training.steps=-1")


def test_a_users_interface_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    name = loopback.interface()
    assert name is not None
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
    with process_group("cpu", "gloo"):
        pass
    assert os.environ["GLOO_SOCKET_IFNAME"] == name


def test_workers_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    try:
        with process_group("cpu", "gloo"):
            assert torch.get_num_threads() == available_cores()
        torch.set_num_threads(1)
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        with process_group("cpu", "gloo"):
            assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


FREED = """
import resource, sys
import torch
from shardwise.launch.process_group import process_group

def touch():
    for _ in range(8):
        large, larger = torch.ones(1 << 22), torch.ones(10 << 20)  # 16 and 40 MiB
        del large, larger

with process_group("cpu", "gloo"):
    touch()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    touch()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
def test_a_cpu_rank_keeps_the_memory_that_it_frees() -> None:
    """Else every step has its pages anew from the system, unless the user has a say in malloc."""
    pages = 8 * (56 << 20) // os.sysconf("SC_PAGE_SIZE")
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "GLIBC_"))}
    clean["PYTHONPATH"] = os.pathsep.join(sys.path)
    run = partial(subprocess.run, [sys.executable, "-c", FREED], check=True, capture_output=True, text=True)
    assert int(run(env=clean).stdout) < pages / 20
    assert int(run(env=clean | {"MALLOC_TRIM_THRESHOLD_": "131072"}).stdout) > pages / 2


def test_a_rank_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(MachineError, match=r"set parallel\.device to cpu"), process_group("cuda", "nccl"):
        pass


def test_a_missing_master_is_named(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    store = loopback.serve_store()
    port = store.port
    del store  # now nobody listens there
    for key, value in zip(PLACE, ("1", "2", "1", "2", "127.0.0.1", str(port))):
        monkeypatch.setenv(key, value)
    message = f"rank 1 of 2 could not meet the others at MASTER_ADDR=127.0.0.1 MASTER_PORT={port}"
    with pytest.raises(MachineError, match=message) as raised, process_group("cpu", "gloo", timeout_seconds=1):
        pass
    assert str(raised.value).count("\n") == 0 and capfd.readouterr().err == ""  # torch would log its C++ stack


def test_ranks_that_were_started_again_do_not_meet_their_former_selves(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under plain torchrun, which keeps its store: a killed rank's memory would be looked for in its successor's."""
    place, kept = RankEnvironment(0, 2, 0, 2, "127.0.0.1", 1, "torchrun"), dist.HashStore()
    monkeypatch.setattr(process_groups, "_stores", {place: kept})
    found = []
    for attempt in ("0", "1", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        monkeypatch.setattr(process_groups, "_groups", Counter())  # a new process
        store = process_groups._meet(place, timedelta(seconds=1))
        found.append(store.add("rank 0", 1))
    assert found == [1, 1, 2]  # ranks of one attempt meet


def group_before_and_after() -> tuple[bool, bool]:
    group = dist.group.WORLD
    with process_group("cpu", "gloo"):
        same = dist.group.WORLD is group
    return same, dist.is_initialized()


def test_an_existing_group_is_used_and_left_alone(world_pool: WorldPool) -> None:
    assert world_pool.run(2, group_before_and_after) == [(True, True)] * 2


def test_the_store_listens_on_the_loopback_address_only() -> None:
    import psutil

    store = loopback.serve_store()
    listening = [c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert [address.ip for address in listening if address.port == store.port] == ["127.0.0.1"]
