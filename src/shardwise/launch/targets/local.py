"""`local`: this machine, in the background. What a launch does elsewhere can be tried here, with the same commands."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from shardwise.errors import ConfigError, LaunchError
from shardwise.job.schema import Job
from shardwise.launch.expected_world import local_cluster
from shardwise.launch.launch_plan import DerivedValue, LaunchPlan
from shardwise.launch.record import LaunchRecord
from shardwise.launch.targets.target import JOB_FILE, LaunchTarget, job_text, script_exports
from shardwise.planner.formulas.prediction import Cluster

LOG_FILE = "log.txt"
SCRIPT = "run.sh"
INTERPRETER = "SHARDWISE_PYTHON"  # the Python of whoever submits, so that the script finds the same packages


class LocalTarget(LaunchTarget):
    """This machine, its workers in the background."""

    name = "local"
    summary = "this machine, in the background"
    keys = ("setup",)

    def find_cluster(self, job: Job) -> Cluster:
        """Return this machine."""
        return super().find_cluster(job) if job.launch.cluster is not None else local_cluster(job)

    def finish(self, plan: LaunchPlan) -> LaunchPlan:
        """Refuse several nodes: there is one."""
        if plan.nodes > 1:
            raise ConfigError(f"launch.cluster={plan.settings.cluster}: this is one machine, not {plan.nodes}; use ssh")
        return super().finish(plan)

    def derive(self, plan: LaunchPlan) -> Iterator[DerivedValue]:
        """Yield the start and the signal."""
        yield DerivedValue("start", "shardwise train", f"starts {plan.ranks_of_node} local workers itself")
        yield DerivedValue("stop", "SIGTERM", "`shardwise jobs stop`: the state is saved first")

    def files(self, plan: LaunchPlan, directory: Path) -> Mapping[str, str]:
        """Return the job and a script."""
        setup = "\n".join(plan.settings.setup)
        job = shlex.quote(str(directory / JOB_FILE))
        restarts = f" --parallel.max_restarts {plan.max_restarts}" if plan.max_restarts else ""
        text = f"""#!/usr/bin/env bash
# {plan.name}: written by `shardwise launch`; `shardwise jobs` knows it once it runs.
set -eo pipefail
{script_exports(plan)}
{setup}
exec "${{{INTERPRETER}:-python3}}" -m shardwise train {job} --parallel.workers {plan.ranks_of_node}{restarts}
"""
        return {SCRIPT: text, JOB_FILE: job_text(plan)}

    def check_client(self, record: LaunchRecord) -> None:
        """Do nothing: bash is there."""

    def submit(self, record: LaunchRecord) -> str:
        """Start the script in a session of its own; its name is process number and start time."""
        with (record.directory / LOG_FILE).open("ab") as log:
            started = subprocess.Popen(
                ["bash", str(record.directory / SCRIPT)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env={**os.environ, INTERPRETER: sys.executable},
            )  # fmt: skip
        return f"{started.pid}@{psutil.Process(started.pid).create_time():.2f}"

    def status(self, record: LaunchRecord) -> str:
        """Return whether the process runs."""
        return "running" if self._process(record) else "ended"

    def logs(self, record: LaunchRecord) -> str:
        """Return the log."""
        log = record.directory / LOG_FILE
        return log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""

    def stop(self, record: LaunchRecord) -> None:
        """Send SIGTERM, upon which the state is saved."""
        process = self._process(record)
        if process is None:
            raise LaunchError(f"{record.name} has ended already; there is nothing to stop")
        process.send_signal(signal.SIGTERM)

    def _process(self, record: LaunchRecord) -> Any:
        """Return the process, if it is still the one that was started."""
        pid, _, created = record.identifier.partition("@")
        try:
            process = psutil.Process(int(pid))
            is_same = abs(process.create_time() - float(created)) < 0.1
            return process if is_same and process.status() != psutil.STATUS_ZOMBIE else None
        except (ValueError, psutil.NoSuchProcess):
            return None
