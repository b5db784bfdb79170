"""Where topology shows: in `shardwise doctor`, in the backend that a job joins with, and behind the name `smddp`."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.collectives import engine, topology
from shardwise.collectives.hierarchical import HierarchicalGroup
from shardwise.commands import doctor
from shardwise.job.schema import Job
from shardwise.launch import loopback
from shardwise.launch.job_group import usable_backend
from shardwise.plan.plan import World, resolve
from shardwise.smp.session import launched_world
from shardwise.smp.v1 import smddp
from shardwise.smp.v1.session import state
from shardwise.testing.world import WorldPool
from tests.parity.jobs import make_job
from tests.plan.rules.jobs import FACTS


def rows(hosts: str) -> list[tuple[str, str]]:
    os.environ[topology.HOST_VARIABLE] = hosts[dist.get_rank()]
    return list(doctor._topology())


def test_doctor_shows_hosts_and_shared_devices(world_pool: WorldPool) -> None:
    shown = world_pool.run(3, rows, "aba")
    assert shown[0] == [
        ("node 0", "a: rank 0 (local 0), 2 (local 1)"),
        ("", "cpu: ranks 0, 2"),
        ("node 1", "b: rank 1 (local 0)"),
        ("", "cpu: rank 1"),
    ]
    assert shown[1] == shown[2] == shown[0]


def test_ranks_of_a_device() -> None:
    found = replace(topology.of_identities(["a", "a", "a", "b"]), devices=("x", "x", "y", "x"))
    assert [found.sharers(rank) for rank in range(4)] == [(0, 1), (0, 1), (2,), (3,)]


@pytest.mark.parametrize(
    ("backend", "algorithm", "joins"),
    [
        ("auto", "auto", "measured_gloo_shardwise"),
        ("auto", "flat", "gloo"),
        ("gloo", "direct", "direct_gloo_gloo"),
        ("gloo", "auto", "measured_gloo_gloo"),
    ],
)
def test_the_backend_of_a_job_on_two_hosts(backend: str, algorithm: str, joins: str) -> None:
    parallel = {"ddp_dist_backend": backend, "collective_algorithm": algorithm}
    plan = resolve(Job.model_validate({"parallel": parallel}), World(4, "cpu", 2, hosts=2), FACTS)
    assert usable_backend(plan, print) == joins


# --- smddp


def carried(hosts: str) -> tuple[str, float, str]:
    os.environ[topology.HOST_VARIABLE] = hosts[dist.get_rank()]
    smddp.register_smddp()
    group = dist.new_group(backend="smddp")
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total, group=group)
    device = torch.device("cpu")
    return group._get_backend(device).name(), total.item(), smddp.NAME


def test_smddp_is_the_engine_on_one_host_and_on_several(world_pool: WorldPool) -> None:
    assert not engine.obstacle()
    assert world_pool.run(2, carried, "aa") == [("shardwise", 1.0, "smddp")] * 2
    assert world_pool.run(2, carried, "ab") == [("shardwise", 1.0, "smddp")] * 2


# --- SMP


def test_smps_world_is_known_before_the_ranks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "h"}
    for name, value in (variables | {"MASTER_PORT": "29500"}).items():
        monkeypatch.setenv(name, value)
    assert launched_world("cpu") == World(4, "cpu", 2, hosts=2)


def initialized(hosts: str, options: dict[str, Any]) -> tuple[str, float]:
    """`smp.init` in processes that have no group yet."""
    rank, world = dist.get_rank(), dist.group.WORLD
    assert world is not None
    store = dist.PrefixStore("smp", world.get_group_store())
    if rank == 0:
        server = loopback.serve_store()
        store.set("port", str(server.port))
    port = int(store.get("port"))
    dist.barrier()
    dist.destroy_process_group()
    os.environ |= {
        topology.HOST_VARIABLE: hosts[rank], "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": str(rank % 2),
        "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    state.init(options)
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    kind = type(dist.group.WORLD).__name__
    dist.barrier()
    state.reset()
    return kind, total.item()


@pytest.mark.slow
@pytest.mark.parametrize(("on", "kind"), [(True, HierarchicalGroup.__name__), (False, "ProcessGroup")])
def test_smps_switch(
    world_pool: WorldPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on: bool, kind: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = {"ddp": True, "sharded_data_parallel_degree": 4, "sdp_hierarchical_allgather": on}
    assert world_pool.run(4, initialized, "aabb", options) == [(kind, 6.0)] * 4


# --- a whole command


@pytest.mark.slow
def test_a_training_over_two_hosts(corpora: Path, tmp_path: Path) -> None:
    """`shardwise train` under a launcher that says two hosts: it measures, says so, and learns."""
    job = make_job(corpora, "gpt2", training={"steps": 3}, parallel={"ddp_dist_backend": "gloo"})
    path = tmp_path / "job.json"
    path.write_text(job.model_copy(update={"output": str(tmp_path / "run")}).model_dump_json(exclude_unset=True))
    server, ranks = loopback.serve_store(), []
    same = {
        "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": server.port,
        "TORCHELASTIC_USE_AGENT_STORE": True, "OMP_NUM_THREADS": 1, "GLOO_SOCKET_IFNAME": loopback.interface(),
        "XDG_CACHE_HOME": tmp_path / "cache",
    }  # fmt: skip
    command = [sys.executable, "-m", "shardwise", "train", str(path), "--output", str(tmp_path / "run")]
    for rank in range(4):
        place = same | {"RANK": rank, "LOCAL_RANK": rank % 2, topology.HOST_VARIABLE: f"host-{rank // 2}"}
        variables = os.environ | {name: str(value) for name, value in place.items()}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        ranks.append(subprocess.Popen(command, env=variables, text=True, **pipes))
    said = [rank.communicate(timeout=240) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * 4, said
    assert "note: collectives over 2 hosts of 2 ranks, measured: all_gather" in said[0][1]
    assert (tmp_path / "run" / "model" / "config.json").is_file()
    assert not any("collectives over" in errors for _, errors in said[1:])
