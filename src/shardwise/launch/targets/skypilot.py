"""`skypilot`: a task of SkyPilot, as a managed job, which is started again after its capacity was taken away.

`run` is executed on every node; `shardwise train` finds the others by SkyPilot's variables.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError, LaunchError
from shardwise.launch.client import require_client, run_client
from shardwise.launch.launch_plan import DerivedValue, LaunchPlan
from shardwise.launch.record import LaunchRecord
from shardwise.launch.targets.target import JOB_FILE, LaunchTarget, job_text, local_paths, manifest_text, setup_lines

TASK = "task.yaml"
JOB_PATH = "~/shardwise/job.yaml"
ACCELERATORS = {
    "A100 40GB": "A100", "A100 80GB": "A100-80GB", "H100 SXM": "H100", "H200 SXM": "H200", "V100 SXM": "V100",
    "V100 SXM 32GB": "V100-32GB", "RTX A6000": "RTXA6000", "RTX 4090": "RTX4090", "RTX 3090": "RTX3090",
}  # fmt: skip  # SkyPilot's names, where they are others


class SkyPilotTarget(LaunchTarget):
    """A managed job of SkyPilot."""

    name = "skypilot"
    summary = "a managed job of SkyPilot"
    keys = ("image", "mounts", "secrets", "setup", "labels", "region", "spot", "port")
    names_jobs = True
    secret_form = re.compile(r"env:[A-Za-z_][A-Za-z0-9_]*")
    secret_example = "env:NAME, a variable of the shell that submits"

    def finish(self, plan: LaunchPlan) -> LaunchPlan:
        """Refuse references to variables of other names, which SkyPilot cannot take."""
        for variable, reference in plan.settings.secrets.items():
            if reference != f"env:{variable}":
                raise ConfigError(
                    f"launch.secrets.{variable}={reference}: SkyPilot takes a secret from the variable of its own "
                    f"name; use env:{variable}"
                )
        lost = (
            f"{key}={path} lies on the node's own disk and ends with the managed job, below launch.mounts too, which "
            "are copies; a URL as checkpoint.directory is kept"
            for key, path in local_paths(plan).items()
        )
        return super().finish(replace(plan, notes=(*plan.notes, *lost)))

    def derive(self, plan: LaunchPlan) -> Iterator[DerivedValue]:
        """Yield resources, start and restarts."""
        settings = plan.settings
        for name, value in _resources(plan).items():
            is_derived = name == "infra" and settings.region is None
            rule = RULES["instance_type"] if is_derived else RULES[name]
            yield DerivedValue(f"resources.{name}", str(value), rule)
        yield DerivedValue("start", _command(plan), "on every node; the others by SKYPILOT_NODE_IPS")
        port = settings.port or "20000 + a number of the task"
        rule = "launch.port" if settings.port else "SKYPILOT_TASK_ID, so that tasks of one host differ"
        yield DerivedValue("rank 0", f"the first of SKYPILOT_NODE_IPS:{port}", rule)

    def files(self, plan: LaunchPlan, directory: Path) -> Mapping[str, str]:
        """Return the job and the task."""
        return {TASK: manifest_text(task_of(plan, directory)), JOB_FILE: job_text(plan)}

    def record(self, plan: LaunchPlan) -> dict[str, object]:
        """Return the names of the secrets, which the submitting shell holds."""
        return {"secrets": sorted(plan.settings.secrets)}

    def check_client(self, record: LaunchRecord) -> None:
        """Ask sky whether it may use a cloud."""
        require_client("sky")
        try:
            run_client(["sky", "check"])
        except LaunchError as error:
            raise LaunchError(f"sky has no cloud to use, so nothing was submitted: {error}") from None

    def submit(self, record: LaunchRecord) -> str:
        """Start a managed job, known by its name."""
        secrets = [word for name in record.details["secrets"] for word in ("--secret", name)]
        task = str(record.directory / TASK)
        run_client(["sky", "jobs", "launch", "--name", record.name, *secrets, "--yes", "--detach-run", task])
        return record.name

    def status(self, record: LaunchRecord) -> str:
        """Return the line of the job in sky's queue."""
        lines = run_client(["sky", "jobs", "queue"]).splitlines()
        own = [line for line in lines if record.name in line.split()]
        return own[0].strip() if own else "not in sky's queue"

    def logs(self, record: LaunchRecord) -> str:
        """Return what the job has printed."""
        return run_client(["sky", "jobs", "logs", "--no-follow", "--name", record.name])

    def stop(self, record: LaunchRecord) -> None:
        """Cancel the job."""
        run_client(["sky", "jobs", "cancel", "--yes", "--name", record.name])


RULES = {
    "infra": "launch.region",
    "instance_type": "launch.cluster's instance",
    "accelerators": "launch.cluster",
    "cpus": "launch.cluster, or a rank each",
    "image_id": "launch.image",
    "use_spot": "launch.spot",
    "network_tier": "several nodes with EFA",
    "labels": "launch.labels",
    "job_recovery": "parallel.max_restarts; lost capacity is replaced besides",
}


def task_of(plan: LaunchPlan, directory: Path) -> dict[str, Any]:
    """Return the task; sky reads the job file from `directory`, wherever it is called."""
    settings = plan.settings
    task: dict[str, Any] = {"name": plan.name, "num_nodes": plan.nodes, "resources": _resources(plan)}
    variables = {**plan.environment, **({"MASTER_PORT": str(settings.port)} if settings.port else {})}
    task["envs"] = variables
    if settings.secrets:
        task["secrets"] = dict.fromkeys(settings.secrets)  # null: the submitting shell gives the value
    task["file_mounts"] = {JOB_PATH: str(directory / JOB_FILE), **settings.mounts}
    # No `setup` of a task: that is another shell, whose variables and directory the start would not have.
    return task | {"run": "".join(f"{line}\n" for line in (*setup_lines(plan), _command(plan)))}


def _resources(plan: LaunchPlan) -> dict[str, Any]:
    settings, where = plan.settings, plan.cluster
    name = ACCELERATORS.get(where.accelerator.name, where.accelerator.name)
    count = plan.resources.accelerators
    asked = {
        "infra": settings.region or ("aws" if where.instance else None),
        "instance_type": where.instance or None,
        "accelerators": f"{name}:{count}" if count and not where.instance else None,
        "cpus": None if count or where.instance else f"{plan.resources.cpus or plan.ranks_of_node}+",
        "image_id": None if settings.image is None else f"docker:{settings.image}",
        "use_spot": settings.spot or None,
        "network_tier": "best" if where.efa and where.nodes > 1 else None,
        "labels": settings.labels or None,
        "job_recovery": {"max_restarts_on_errors": plan.max_restarts} if plan.max_restarts else None,
    }
    return {key: value for key, value in asked.items() if value is not None}


def _command(plan: LaunchPlan) -> str:
    on_cpu = [] if plan.resources.accelerators else ["--parallel.workers", str(plan.ranks_of_node)]
    return f"shardwise train {JOB_PATH}{''.join(' ' + word for word in map(shlex.quote, on_cpu))}"
