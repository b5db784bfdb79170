"""Jobs that are launched on each target, and the golden files of what is written.

`python -m tests.launch.targets.jobs_for_launch` writes the golden files again.
"""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import Any

from shardwise.job.schema import Job
from shardwise.job.sources import load_job
from shardwise.launch.launch_plan import LaunchPlan
from shardwise.launch.launcher import find_target, plan_for_target
from tests.pages import DOCS
from tools.page_commands import PageFile, ShownCommand, read_page

GOLDEN = Path(__file__).parent / "golden"
PLACE = Path("/shared/launches/llama")  # where the files of the golden launches would lie

# A model that only the nodes have: nothing is built here.
JOB: dict[str, Any] = {
    "model": {"path": "/data/models/llama3-8b"},
    "data": {"path": "/data/corpus", "sequence_length": 4096},
    "training": {"steps": 1000, "sequences_per_step": 256},
    "parallel": {"tensor_parallel_degree": 2, "max_restarts": 3},
    "checkpoint": {"every": 100},
    "output": "/data/runs/llama",
}
IMAGE = "registry.example/shardwise:0.2"
ENVIRONMENT = {"environment": {"NCCL_DEBUG": "WARN"}}
ON_KUBERNETES: dict[str, Any] = {
    **ENVIRONMENT,
    "cluster": "p5.48xlarge:4",
    "image": IMAGE,
    "pull_secret": "registry",
    "namespace": "team-a",
    "queue": "users",
    "priority": "high",
    "required_topology": "cloud.provider.com/topology-block",
    "time_limit": "1-00:00:00",
    "mounts": {"/data": "pvc:data", "/scratch": "host:/mnt/scratch"},
    "secrets": {"WANDB_API_KEY": "wandb/key"},
    "labels": {"team": "a"},
    "node_selector": {"disk": "fast"},
    "service_account": "trainer",
}
ROLE = "arn:aws:iam::111122223333:role/Training"
SETTINGS: dict[str, dict[str, Any]] = {
    "slurm": {
        **ENVIRONMENT, "cluster": "dgx-h100:4", "queue": "gpu", "account": "team-a", "priority": "high",
        "time_limit": "36h", "setup": ["source /opt/venv/bin/activate"],
        "secrets": {"WANDB_API_KEY": "file:/home/me/.wandb"},
    },
    "trainjob": ON_KUBERNETES,
    "pytorchjob": ON_KUBERNETES,
    "jobset": ON_KUBERNETES,
    "hyperpod": ON_KUBERNETES,
    "skypilot": {
        **ENVIRONMENT, "cluster": "h100:32", "image": IMAGE, "region": "aws/us-east-1", "spot": True,
        "mounts": {"/data": "s3://bucket/data"}, "setup": ["pip install my-package"],
        "secrets": {"WANDB_API_KEY": "env:WANDB_API_KEY"}, "labels": {"team": "a"},
    },
    "sagemaker": {
        **ENVIRONMENT, "cluster": "ml.p5.48xlarge:4", "image": IMAGE, "role": ROLE, "output_path": "s3://bucket/runs",
        "time_limit": "2d", "spot": True, "labels": {"team": "a"}, "subnets": ["subnet-1"], "security_groups": ["sg-1"],
        "mounts": {
            "/opt/ml/input/data/corpus": "s3://bucket/corpus",
            "/opt/ml/input/data/models": "fsx:fs-0123456789abcdef0/models",
        },
    },
    "ssh": {**ENVIRONMENT, "cluster": "h100:16", "hosts": ["me@host1", "me@host2"], "setup": ["cd /work"]},
    "local": {**ENVIRONMENT, "cluster": "cpu:2", "setup": ["ulimit -n 4096"]},
}  # fmt: skip
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "trainjob-2.1": ("trainjob", {"trainer_version": "2.1", "time_limit": None}),
    "slurm-container": ("slurm", {"image": IMAGE, "mounts": {"/data": "/shared/data"}, "port": 29501}),
    "skypilot-instances": ("skypilot", {"cluster": "p4d.24xlarge:2", "region": None, "spot": False}),
    "pytorchjob-elastic": ("pytorchjob", {"least_nodes": 2, "most_nodes": 6}),
    "hyperpod-elastic": ("hyperpod", {"least_nodes": 2, "most_nodes": 6, "stop_seconds": 600}),
    "jobset-cpu": ("jobset", {"cluster": "m5.4xlarge:2", "queue": None, "priority": None, "required_topology": None}),
}
CASES = {**{target: (target, {}) for target in SETTINGS}, **VARIANTS}


def job_for(target: str, **changes: Any) -> Job:
    """Return the job with the settings of a target, changed; None leaves a setting out."""
    settings = {key: value for key, value in {**SETTINGS[target], **changes}.items() if value is not None}
    return load_job({**JOB, "launch": settings}, environ={})


def plan_of(case: str) -> LaunchPlan:
    """Return the plan of a case."""
    target, changes = CASES[case]
    return plan_for_target(job_for(target, **changes), target, "llama")


def files_of(case: str) -> dict[str, str]:
    """Return the files of a case, with the table of what was derived."""
    plan = plan_of(case)
    table = "".join(f"{key} | {value} | {rule}\n" for key, value, rule in plan.derived)
    notes = "".join(f"note: {note}\n" for note in plan.notes)
    return {**find_target(CASES[case][0]).files(plan, PLACE), "derived.txt": table + notes}


def launch_of_tutorial(target: str, directory: Path) -> list[str]:
    """Write the job of docs/tutorial.md into a directory; return the words with which the page launches it."""
    parts = list(read_page((DOCS / "tutorial.md").read_text(encoding="utf-8")))
    (job,) = [part for part in parts if isinstance(part, PageFile) and part.name == "job.yaml"]
    (directory / "job.yaml").write_text(job.text)
    commands = [shlex.split(part.text) for part in parts if isinstance(part, ShownCommand)]
    (words,) = [words for words in commands if words[1:5] == ["launch", "job.yaml", "--to", target]]
    return [*words[1:], "--submit"]


def write_golden() -> None:
    """Write all golden files again."""
    shutil.rmtree(GOLDEN, ignore_errors=True)
    for case in CASES:
        for name, text in files_of(case).items():
            (GOLDEN / case).mkdir(parents=True, exist_ok=True)
            (GOLDEN / case / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_golden()
