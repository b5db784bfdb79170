"""`shardwise launch --to slurm --submit` and `shardwise jobs` on a Slurm of this machine, and what Slurm does to jobs.

Needs root and Debian's packages slurm-wlm and munge. Where they are missing, the tests are skipped with their names.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwise.commands.cli import main
from shardwise.errors.exit_codes import MISTAKE
from shardwise.job.sources import load_job
from shardwise.launch import jobs
from shardwise.launch.launcher import launch
from shardwise.launch.record import read_record
from tests.launch.named_hosts import ROOT, wait_until
from tests.launch.slurm_cluster import SlurmCluster, obstacle
from tests.launch.targets.jobs_for_launch import launch_of_tutorial

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(obstacle()), reason=obstacle() or "there can be one"),
    pytest.mark.timeout(1200),
]
STEPS = 120
JOB: dict[str, Any] = {
    "model": {"config": {"model_type": "gpt2", "n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 32}},
    "training": {"steps": STEPS, "sequences_per_step": 8, "evaluate_batches": 1},
    "data": {"sequence_length": 16, "vocabulary_size": 300},
    "observe": {"tensorboard": False, "sample": False, "log_every": 1},
    "precision": {"compute": "fp64"},
    "checkpoint": {"every": 10},
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Two compute nodes and a login node; nothing is left of them."""
    made = SlurmCluster(tmp_path_factory.mktemp("slurm"))
    try:
        made.build()
        yield made
    finally:
        made.tear_down()


@pytest.fixture
def login(cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> SlurmCluster:
    """Let this process be one of a user of the login node."""
    for name, value in cluster.variables().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{cluster.directory}/clients{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(cluster.directory)
    return cluster


def submit(cluster: SlurmCluster, name: str, ranks_of_node: int, **sections: dict[str, Any]) -> tuple[Path, str]:
    """Launch a job on both nodes; return its directory and its number."""
    (cluster.directory / "corpus.txt").write_text("all work and no play makes jack a dull boy\n" * 300)
    nodes = cluster.directory / f"nodes-of-{ranks_of_node}.yaml"
    nodes.write_text(f"accelerator: cpu\nnodes: 2\nper_node: {ranks_of_node}\n")
    settings = {name: {**JOB.get(name, {}), **sections.get(name, {})} for name in {*JOB, *sections}}
    settings["data"] = {"path": str(cluster.directory / "corpus.txt"), **settings["data"]}
    settings["launch"] = {"cluster": str(nodes), "name": name, **settings.get("launch", {})}
    job = load_job({**settings, "output": str(cluster.directory / f"{name}-run")}, environ={})
    launched = launch(job, "slurm", cluster.directory / name, submit=True)
    return launched.directory, launched.identifier


def losses(run: Path) -> dict[int, float]:
    """Return the loss of every step of a run, of its last try where there were several."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def test_a_submitted_job_trains_on_both_nodes(login: SlurmCluster) -> None:
    directory, number = submit(login, "whole", 2)
    login.wait_for(number, JobState="COMPLETED")
    log = jobs.job_logs(directory)
    assert "4 cpu ranks" in log and log.count(f"step {STEPS}/{STEPS}  loss") == 1
    assert jobs.job_status(directory) == "COMPLETED"
    assert jobs.launch_table(login.directory).row_count == 1


BY_RANK = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=2 --output={log} --job-name=by-rank
srun shardwise train {job} --output {output}
"""


def test_one_task_a_rank_trains_the_same_numbers(login: SlurmCluster) -> None:
    """As docs/how-to/launchers.md starts it."""
    whole, number = submit(login, "by-node", 1)
    login.wait_for(number, JobState="COMPLETED")
    output = login.directory / "by-rank-run"
    script = login.directory / "by-rank.sh"
    script.write_text(BY_RANK.format(log=login.directory / "by-rank.txt", job=whole / "job.yaml", output=output))
    number = login.run("sbatch", "--parsable", str(script)).strip()
    login.wait_for(number, JobState="COMPLETED")
    assert "4 cpu ranks" in (login.directory / "by-rank.txt").read_text()
    assert losses(output) == pytest.approx(losses(login.directory / "by-node-run"), rel=1e-9)


def test_a_job_goes_on_where_a_dead_node_left_it(login: SlurmCluster) -> None:
    directory, number = submit(login, "undisturbed", 1)
    login.wait_for(number, JobState="COMPLETED")
    directory, number = submit(login, "killed", 1, parallel={"max_restarts": 2})
    run = login.directory / "killed-run"
    wait_until(lambda: (run / "checkpoints").exists() and "step 15/" in jobs.job_logs(directory), "it has a checkpoint")
    login.lose_node(2)
    login.wait_for(number, JobState="PENDING", Restarts="1")
    login.start_node(2)
    wait_until(lambda: login.states() == {"idle"}, "the node is back")  # else Slurm ends the new try with the old one
    login.run("scontrol", "update", f"JobId={number}", "StartTime=now")
    login.wait_for(number, JobState="COMPLETED", Restarts="1")
    assert "resumed" in jobs.job_logs(directory)
    assert losses(run) == pytest.approx(losses(login.directory / "undisturbed-run"), rel=1e-9)


def test_a_signal_ahead_of_the_limit_saves_and_requeues_and_stop_saves_again(login: SlurmCluster) -> None:
    endless = {"steps": 1_000_000}
    limit = {"time_limit": "5h", "stop_seconds": 60}
    directory, number = submit(login, "limited", 1, training=endless, parallel={"max_restarts": 1}, launch=limit)
    wait_until(lambda: "step 3/" in jobs.job_logs(directory), "it trains", lambda: jobs.job_logs(directory))
    assert jobs.job_status(directory) == "RUNNING"
    minutes = login.job(number)["RunTime"].split(":")[1]
    login.run("scontrol", "update", f"JobId={number}", f"TimeLimit={int(minutes) + 2}")
    login.wait_for(number, JobState="PENDING", Restarts="1")
    saved = re.search(r"stopped after step (\d+): SIGUSR1 received by rank", jobs.job_logs(directory))
    assert saved, jobs.job_logs(directory)
    login.run("scontrol", "update", f"JobId={number}", "StartTime=now", "TimeLimit=300")
    following = f"step {int(saved[1]) + 1}/"
    wait_until(lambda: following in jobs.job_logs(directory), "it goes on", lambda: jobs.job_logs(directory))
    jobs.stop_job(directory)
    login.wait_for(number, JobState="CANCELLED")
    wait_until(lambda: login.states() == {"idle"}, "its nodes are free", lambda: jobs.job_logs(directory))
    assert "SIGTERM received by rank" in jobs.job_logs(directory), jobs.job_logs(directory)


def test_a_mistake_is_not_tried_again(login: SlurmCluster) -> None:
    missing = {"path": str(login.directory / "nowhere.txt")}
    directory, number = submit(login, "mistaken", 1, data=missing, parallel={"max_restarts": 2})
    said = login.wait_for(number, JobState="FAILED")
    assert (said["ExitCode"], said["Restarts"]) == (f"{MISTAKE}:0", "0")
    assert "nowhere.txt" in jobs.job_logs(directory) and jobs.job_status(directory) == "FAILED"


def test_the_tutorial_s_job_ends_on_slurm(login: SlurmCluster) -> None:
    (login.directory / "src").symlink_to(ROOT / "src")
    assert main(launch_of_tutorial("slurm", login.directory)) == 0
    directory = login.directory / "job-slurm"
    login.wait_for(read_record(directory).identifier, JobState="COMPLETED")
    assert "step 40/40  validation loss" in jobs.job_logs(directory)
    assert (login.directory / "runs" / "mine" / "model" / "config.json").exists()
