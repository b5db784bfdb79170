"""Two agents of torchrun, of which one is killed with its worker: the other goes on with fewer ranks.

`shardwise` resolves the job for the ranks that met, after each meeting; torch's agents decide who meets.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from shardwise.checkpoint.catalog import complete
from shardwise.checkpoint.stores import LocalStore

ROOT = Path(__file__).parents[2]
MODULE = """
import os
import time

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x


def loss(output, batch):
    each = (output - batch.labels).square().mean(-1)
    return (each * batch.counted).sum(), batch.counted.sum()


class Points:
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(3))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
            time.sleep(0.02)  # so that there is time to lose an agent in
        return {"x": self.x[index], "labels": self.x[index].flip(0)}
"""


def wait_until(condition: Callable[[], Any], agents: list[subprocess.Popen], seconds: float = 200) -> None:
    """Fails when an agent ends meanwhile, or long after the condition should have come true."""
    end = time.monotonic() + seconds
    while not condition():
        assert all(agent.poll() is None for agent in agents), "an agent ended"
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.1)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def steps(output: Path, ranks: int) -> list[int]:
    """The steps that so many ranks did, by the ranks whose memory the records of the run hold."""
    path = output / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return [record["step"] for record in records if len(record.get("peak_memory_bytes", [])) == ranks]


def complete_checkpoints(output: Path) -> list[str]:
    return [name for name, _ in complete(LocalStore(str(output / "checkpoints")))]


@contextmanager
def agent(name: str, port: int, directory: Path) -> Iterator[subprocess.Popen]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "test"]
    command += ["--rdzv-conf", "last_call_timeout=8,keep_alive_interval=1,keep_alive_max_attempt=3"]
    command += ["--local-addr", "127.0.0.1", "--max-restarts", "3", "-m", "shardwise", "train", "job.yaml"]
    path = os.pathsep.join([str(ROOT / "src"), str(directory)])
    environment = os.environ | {"PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(directory)}
    environment["OMP_NUM_THREADS"] = "1"
    with (directory / f"{name}.log").open("w") as log:
        started = subprocess.Popen(command, cwd=directory, env=environment, stdout=log, stderr=log)
    try:
        yield started
    finally:
        kill_tree(started)


def kill_tree(process: subprocess.Popen) -> None:
    """A machine that is gone takes leave of nobody. The agent first, lest it restart its worker."""
    if process.poll() is not None:
        return  # its number may be another process's by now
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    for child in children:
        if child.is_running():
            child.send_signal(signal.SIGKILL)
    process.wait()


@pytest.mark.slow  # over a minute: each process imports torch, and a lost agent is missed only after a while
def test_training_goes_on_with_the_agent_that_is_left(tmp_path: Path) -> None:
    output = tmp_path / "run"
    (tmp_path / "points.py").write_text(MODULE)
    job = {
        "model": {"factory": "points:Model", "loss": "points:loss"},
        "data": {"factory": "points:Points", "cache_directory": str(tmp_path / "cache")},
        "parallel": {"device": "cpu"},
        "training": {"steps": 150, "sequences_per_step": 4, "evaluate_batches": 1},
        "checkpoint": {"every": 5},
        "observe": {"tensorboard": False},
        "output": str(output),
    }
    (tmp_path / "job.yaml").write_text(json.dumps(job))  # JSON is YAML
    port = free_port()
    with agent("first", port, tmp_path) as first:
        wait_until(lambda: listens(port), [first])  # it serves the rendezvous, which has to outlive the other
        with agent("second", port, tmp_path) as second:
            wait_until(lambda: complete_checkpoints(output) and steps(output, ranks=2), [first, second])
            kill_tree(second)
        assert first.wait(timeout=200) == 0, (tmp_path / "first.log").read_text()
    log = (tmp_path / "first.log").read_text()
    together, alone = steps(output, ranks=2), steps(output, ranks=1)
    assert together + alone == list(range(1, 151)), log
    assert together[-1] >= 5 and together[-1] % 5 == 0  # what came after the newest checkpoint was done again
    assert f"step-{together[-1]:08d}: step {together[-1]}" in log
    assert (output / "report.html").exists()
