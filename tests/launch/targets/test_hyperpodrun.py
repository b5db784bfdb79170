"""The start of HyperPod's manifest under Amazon's own agent, really installed; the test plays the operator.

Two pods train, are told to make room, and one goes on alone: ranks save their state before the agent ends them.
`pip install --target DIR --no-deps hyperpod-elastic-agent fastapi==0.115.12 starlette==0.46.2 uvicorn h11 click psutil`
and `PYTHONPATH=DIR` give this environment the agent.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwise.job.sources import load_job
from shardwise.launch.launcher import find_target, plan_for_target
from tests.launch.named_hosts import wait_until
from tests.launch.targets.jobs_for_launch import IMAGE
from tests.launch.targets.test_files import manifest_of
from tests.launch.targets.test_starts import free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        importlib.util.find_spec("hyperpod_elastic_agent") is None, reason="hyperpod-elastic-agent is missing"
    ),
]
AGENT = Path(__file__).with_name("hyperpod_agent.py")
JOB: dict[str, Any] = {
    "model": {"config": {"model_type": "gpt2", "n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 32}},
    "training": {"steps": 100_000, "sequences_per_step": 4, "evaluate_batches": 1},
    "data": {"path": "rows.txt", "sequence_length": 16, "vocabulary_size": 300},
    "observe": {"tensorboard": False, "sample": False},
    "parallel": {"max_restarts": 1},
}


class Pod:
    """A pod of the manifest, and the operator's words to its agent."""

    def __init__(self, rank: int, words: list[str], directory: Path, temporary: str) -> None:
        self.rank, self.port, self.log = rank, free_port(), directory / f"pod-{rank}.log"
        command = [sys.executable, str(AGENT), f"--server-port={self.port}", "--server-host=127.0.0.1", *words]
        own = {"NNODES": "2", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TMPDIR": temporary}
        variables = os.environ | own
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, cwd=directory, env=variables, stdout=log, stderr=log)

    def call(self, path: str, **content: Any) -> str:
        """Return what the agent answers to the operator; empty where it does not."""
        body = json.dumps(content).encode() if content else None
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/{path}", body, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return str(answer.read().decode())
        except OSError:
            return ""

    def start(self, nodes: int, port: int) -> None:
        """Start the ranks, of so many nodes."""
        self.call("start", rank=self.rank, nnodes=nodes, faultCount=0, master_addr="127.0.0.1", master_port=port)

    def make_room(self) -> None:
        """Tell the ranks that the number of nodes changes, as the operator does, and wait until they are gone."""
        self.call("stop", restart_mode="plr", is_graceful=True, timeout=120)
        self.wait(lambda: '"status":"ready"' in self.call("status"), "its ranks have ended")

    def wait(self, holds: Any, what: str) -> None:
        """Wait, and say what the agent said where it does not come true."""
        assert self.process.poll() is None, self.log.read_text()
        wait_until(holds, what, self.log.read_text, 600)

    def steps(self) -> list[int]:
        """Return the steps that rank 0 has printed."""
        return [int(step) for step in re.findall(r"^step (\d+)/", self.log.read_text(), re.MULTILINE)]


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[list[Pod]]:
    """Two pods of the manifest whose agents wait for the operator."""
    (tmp_path / "rows.txt").write_text("all work and no play makes jack a dull boy\n" * 3000)
    settings = {"cluster": "m5.xlarge:2", "least_nodes": 1, "image": IMAGE}
    plan = plan_for_target(load_job({**JOB, "launch": settings, "output": "run"}, environ={}), "hyperpod", "tiny")
    files = dict(find_target("hyperpod").files(plan, tmp_path))
    (tmp_path / "job.yaml").write_text(files["job.yaml"])
    container = manifest_of(files)["spec"]["replicaSpecs"][0]["template"]["spec"]["containers"][0]
    program, *options = container["command"]
    assert program == "hyperpodrun" and options[-3:] == ["shardwise", "train", "/shardwise/job.yaml"]
    words = [*options[:-3], sys.executable, "-m", "shardwise", "train", "job.yaml"]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:  # of the agents, which leave files
        made = [Pod(rank, words, tmp_path, temporary) for rank in range(2)]
        yield made
        for pod in made:
            pod.call("shutdown", now=True)
        for pod in made:
            pod.process.wait(timeout=60)


def test_pods_make_room_and_one_goes_on(pods: list[Pod], tmp_path: Path) -> None:
    first = pods[0]
    for pod in pods:
        pod.wait(lambda pod=pod: '"status":"ready"' in pod.call("status"), "the agent is ready")
    port = free_port()
    for pod in pods:
        pod.start(2, port)
    first.wait(lambda: len(first.steps()) >= 5, "two train")
    for pod in pods:
        pod.make_room()
    [before] = (tmp_path / "run" / "checkpoints").glob("step-*")
    first.start(1, free_port())
    first.wait(lambda: first.steps()[-1] > int(before.name.partition("-")[2]) + 3, "one trains")
    first.make_room()
    log = first.log.read_text()
    assert f"resumed from run/checkpoints/{before.name}: " in log
    assert "written by 2 ranks and is read by 1" in log and log.count("SIGUSR1 received by rank 0") == 2
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    tokens = [record["tokens"] for record in records if "grad_norm" in record]
    assert tokens == [tokens[0] * (step + 1) for step in range(len(tokens))]  # the batch stays
