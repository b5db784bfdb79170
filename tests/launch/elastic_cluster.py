"""Hosts that come and go, in network namespaces: `shardwise train` on each with `PET_NNODES=1:3`, one rank a host.

A host is killed as a machine goes away: every process in its namespace at once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.cluster import PORT, Cluster
from tests.launch.named_hosts import kill

ROOT = Path(__file__).resolve().parents[2]
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
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        if os.path.exists("slow"):  # so that there is time to lose a host in
            with open("slow") as file:
                time.sleep(float(file.read() or 0))
        return {"x": self.x[index], "labels": self.x[index].flip(0)}
"""
# On three ranks a step has three samples, and on two a row of padding.
JOB: dict[str, Any] = {
    "model": {"factory": "points:Model", "loss": "points:loss"},
    "data": {"factory": "points:Points"},
    "parallel": {"device": "cpu", "ddp_dist_backend": "gloo"},
    "precision": {"compute": "fp64"},
    "training": {"steps": 60, "microbatch_size": 1, "gradient_accumulation": 1, "evaluate_batches": 1},
    "checkpoint": {"every": 5},
    "observe": {"tensorboard": False},
}


class ElasticCluster:
    """Three hosts of one run.

    Attributes:
        output: of the run, which all hosts share.
    """

    def __init__(self, directory: Path, steps: int, slow: float, sections: Mapping[str, Any]) -> None:
        self.directory, self.output = directory, directory / "run"
        (directory / "slow").write_text(str(slow))
        self.spaces = Cluster(3, name=f"el{os.getpid() % 1_000_000:x}")
        self.hosts: dict[int, subprocess.Popen[str]] = {}
        job = {key: JOB.get(key, {}) | sections.get(key, {}) for key in JOB.keys() | sections.keys()}
        self.job = job | {"training": job["training"] | {"steps": steps}}
        (directory / "points.py").write_text(MODULE)

    def start(self, host: int, **variables: str) -> None:
        """Start the launcher of a host, for the first time or again."""
        data = self.job["data"] | {"cache_directory": str(self.directory / f"cache-{host}")}
        path = self.directory / f"job-{host}.yaml"
        path.write_text(json.dumps(self.job | {"data": data, "output": str(self.output)}))  # JSON is YAML
        environment = self._environment() | {
            "PET_NNODES": "1:3",
            "PET_NPROC_PER_NODE": "1",
            "PET_NODE_RANK": str(host),
            "PET_MASTER_ADDR": self.spaces.address(0),
            "PET_MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": "eth0",
            **variables,
        }
        command = [sys.executable, "-m", "shardwise", "train", str(path)]
        with self.log(host).open("a") as log:
            self.hosts[host] = subprocess.Popen(
                ["ip", "netns", "exec", self.spaces.namespace(host), *command],
                cwd=self.directory, env=os.environ | environment, stdout=log, stderr=log, text=True,
            )  # fmt: skip

    def undisturbed(self) -> Path:
        """Run the same job on one rank, with the batch of three, and return its output."""
        output = self.directory / "alone"
        training = self.job["training"] | {"sequences_per_step": 3, "gradient_accumulation": None}
        job = self.job | {"training": training, "checkpoint": {}, "output": str(output)}
        job["data"] = job["data"] | {"cache_directory": str(self.directory / "cache-alone")}
        path = self.directory / "alone.yaml"
        path.write_text(json.dumps(job))
        command = [sys.executable, "-m", "shardwise", "train", str(path), "--parallel.workers", "1"]
        self.hurry()
        environment = os.environ | self._environment()
        subprocess.run(command, cwd=self.directory, env=environment, check=True, capture_output=True)
        return output

    def hurry(self) -> None:
        """Let samples take no time from now on."""
        (self.directory / "slow").unlink(missing_ok=True)

    def kill(self, host: int) -> None:
        """Let a host go away without a word."""
        for process in self.processes(host):
            kill(process)
        self.hosts[host].wait()

    def processes(self, host: int) -> list[int]:
        """Return the processes on a host."""
        words = ["ip", "netns", "pids", self.spaces.namespace(host)]
        return [int(number) for number in subprocess.run(words, capture_output=True, text=True).stdout.split()]

    def log(self, host: int) -> Path:
        """Return the file that a host's launcher writes to."""
        return self.directory / f"host-{host}.log"

    def logs(self) -> str:
        """Return what all have written."""
        return "".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(self.directory.glob("host-*.log")))

    def records(self) -> list[dict[str, Any]]:
        """Return the records of the steps."""
        return records_of(self.output)

    def ranks(self) -> list[int]:
        """Return how many ranks did each step."""
        return [len(record["peak_memory_bytes"]) for record in self.records()]

    def _environment(self) -> dict[str, str]:
        path = os.pathsep.join([str(ROOT / "src"), str(self.directory)])
        return {
            "PYTHONPATH": path,
            "TMPDIR": str(self.directory),
            "OMP_NUM_THREADS": "1",
        }


def records_of(output: Path) -> list[dict[str, Any]]:
    """Return the records of the steps of a run, whole ones."""
    path = output / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return [record for record in records if "grad_norm" in record]


@contextmanager
def elastic_cluster(
    directory: Path, steps: int, slow: float = 0.05, **sections: Mapping[str, Any]
) -> Iterator[ElasticCluster]:
    """Three hosts, taken down with all that runs on them."""
    made = ElasticCluster(directory, steps, slow, sections)
    try:
        made.spaces.build()
        yield made
    finally:
        for host in made.hosts:
            made.kill(host)
        made.spaces.tear_down()
