"""`slurm`: a batch script for sbatch, one task a node, which starts the node's ranks.

Ahead of the time limit Slurm signals the batch shell alone. It passes USR1 on to the step, whose ranks save their state
and end with a code of their own (`errors/exit_codes.py`), so the script knows whether to put the job back into the
queue. A node that dies does the same by itself (`--requeue`).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from shardwise.errors import ConfigError, LaunchError
from shardwise.errors.exit_codes import RESTARTED
from shardwise.launch.client import require_client, run_client
from shardwise.launch.launch_plan import DerivedValue, LaunchPlan
from shardwise.launch.record import LaunchRecord
from shardwise.launch.targets.target import JOB_FILE, LaunchTarget, job_text, kept_outside, script_exports, setup_lines

SCRIPT = "job.sbatch"
KILLED = 137  # a rank that the kernel killed, for want of memory say
TOO_EARLY = 138  # a rank that got USR1 before it took signals: there was nothing to save
RANKS = "PET_NPROC_PER_NODE"


class SlurmTarget(LaunchTarget):
    """A batch job of Slurm."""

    name = "slurm"
    summary = "a batch job of Slurm"
    keys = ("image", "mounts", "queue", "priority", "account", "time_limit", "stop_seconds", "secrets", "setup", "port")
    secret_form = re.compile(r"file:/\S+")
    secret_example = "file:/home/me/.token, a file that the nodes can read"

    def finish(self, plan: LaunchPlan) -> LaunchPlan:
        """Refuse mounts without a container."""
        if plan.settings.mounts and plan.settings.image is None:
            raise ConfigError(
                "launch.mounts does nothing without a container under Slurm; give launch.image, or leave it out"
            )
        for path, source in plan.settings.mounts.items():
            if not all(place.startswith("/") and not re.search(r"[:,]", place) for place in (path, source)):
                raise ConfigError(
                    f"launch.mounts.{path}={source!r}: Slurm's containers mount directories of the nodes; give both "
                    "from /, without ':' and ','"
                )
        for key in ("queue", "priority", "account"):
            _check_word(f"launch.{key}", getattr(plan.settings, key) or "")
        if plan.settings.image is not None:
            plan = replace(plan, notes=(*plan.notes, *kept_outside(plan)))
        return super().finish(plan)

    def derive(self, plan: LaunchPlan) -> Iterator[DerivedValue]:
        """Yield start, meeting point, signal and requeue."""
        settings = plan.settings
        yield DerivedValue("start", "srun, one task a node", f"shardwise train starts its ranks: {RANKS}")
        port = str(settings.port) if settings.port else "20000 + job number % 12000"
        yield DerivedValue("rank 0", f"the step's first node:{port}", "SLURM_STEP_NODELIST")
        if settings.queue is not None:
            yield DerivedValue("--partition", settings.queue, "launch.queue")
        if plan.time_limit is not None:
            yield DerivedValue("--time", _clock(plan.time_limit), f"launch.time_limit {settings.time_limit}")
        if _is_signalled(plan):
            rule = "launch.stop_seconds before the limit" + ("" if plan.time_limit else ", which is the partition's")
            yield DerivedValue("--signal", f"B:USR1@{settings.stop_seconds}", rule)
        codes = ", ".join(str(code) for code in (KILLED, TOO_EARLY, *RESTARTED))
        rule = f"parallel.max_restarts; after codes {codes} and a dead node"
        yield DerivedValue("requeue", f"{plan.max_restarts} times" if plan.max_restarts else "never", rule)
        if settings.image is not None:
            yield DerivedValue("container", settings.image, "launch.image, by pyxis (--container-image)")

    def files(self, plan: LaunchPlan, directory: Path) -> Mapping[str, str]:
        """Return the job and the batch script.

        Raises:
            ConfigError: the directory is no word of sbatch.
        """
        _check_word("the launch's directory", str(directory))
        return {SCRIPT: batch_script(plan, directory), JOB_FILE: job_text(plan)}

    def check_client(self, record: LaunchRecord) -> None:
        """Look for sbatch."""
        require_client("sbatch")

    def submit(self, record: LaunchRecord) -> str:
        """Submit the script; its name is the number of the job."""
        return run_client(["sbatch", "--parsable", str(record.directory / SCRIPT)]).strip()

    def status(self, record: LaunchRecord) -> str:
        """Return the state that squeue tells, or sacct once the job has ended."""
        number, cluster = _number(record)
        try:
            words = ["squeue", *cluster, "--noheader", "--states=all", "--jobs", number, "--format", "%T"]
            state = run_client(words).strip()
        except LaunchError:
            state = ""  # squeue forgets a job minutes after its end
        if not state:
            words = ["sacct", *cluster, "--noheader", "--parsable2", "--allocations", "--jobs", number]
            state = run_client([*words, "--format", "State"]).strip()
        return state.splitlines()[0] if state else "not known to Slurm"

    def logs(self, record: LaunchRecord) -> str:
        """Return the job's output, which Slurm writes into the directory of the launch."""
        number, _ = _number(record)
        log = record.directory / f"{record.name}-{number}.out"
        return log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""

    def stop(self, record: LaunchRecord) -> None:
        """Cancel the job: its steps get SIGTERM, upon which the state is saved within Slurm's KillWait."""
        number, cluster = _number(record)
        run_client(["scancel", *cluster, number])


def _check_word(what: str, value: str) -> None:
    """Refuse a value that sbatch, which reads options of a script word by word, would take for another."""
    if re.search(r"""[\s'"#%\\]""", value):
        raise ConfigError(f"{what}={value!r}: sbatch reads words; leave out spaces, quotes and any of # % \\")


def batch_script(plan: LaunchPlan, directory: Path) -> str:
    """Return the script that sbatch takes."""
    sbatch_lines = "\n".join(f"#SBATCH --{flag}" for flag in _flags(plan, directory))
    # Hosts agree on how they fail; a step that Slurm killed for one host's code would have another code.
    flags = ["--kill-on-bad-exit=0", *_container_flags(plan, directory)]
    start = ["shardwise", "train", str(directory / JOB_FILE)]
    if lines := setup_lines(plan):  # on every node, and inside of its container
        start = ["bash", "-c", "\n".join([*lines, f"exec {shlex.join(start)}"])]
    words = [*flags, *start]
    codes = " ".join(str(code) for code in (KILLED, TOO_EARLY, *RESTARTED))
    port = f"export MASTER_PORT={plan.settings.port}\n" if plan.settings.port else ""
    return f"""#!/usr/bin/env bash
{sbatch_lines}
set -uo pipefail
{script_exports(plan)}
export {RANKS}={plan.ranks_of_node}
{port}
step= told=
stop() {{  # tell the step's ranks, which save their state
  told=yes
  [[ -z $step ]] || scancel --signal=USR1 "$SLURM_JOB_ID"
}}
trap stop USR1

# A step does not inherit the processors of its job.
srun --cpus-per-task="$SLURM_CPUS_ON_NODE" {shlex.join(words)} &
step=$!
[[ -z $told ]] || stop
code=0
wait "$step" || code=$?
while [[ -n $told ]]; do  # the trap may have ended `wait`
  told= code=0
  wait "$step" || code=$?
done

if [[ " {codes} " == *" $code "* ]] && (( ${{SLURM_RESTART_COUNT:-0}} < {plan.max_restarts} )); then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def _flags(plan: LaunchPlan, directory: Path) -> Iterator[str]:
    settings, resources = plan.settings, plan.resources
    yield f"job-name={plan.name}"
    yield f"nodes={plan.nodes}"
    yield "ntasks-per-node=1"
    if resources.accelerators:
        yield f"gpus-per-node={resources.accelerators}"
        yield "exclusive"
        yield "mem=0"
    else:
        yield f"cpus-per-task={resources.cpus or plan.ranks_of_node}"
    for flag, value in (("partition", settings.queue), ("qos", settings.priority), ("account", settings.account)):
        if value is not None:
            yield f"{flag}={value}"
    if plan.time_limit is not None:
        yield f"time={_clock(plan.time_limit)}"
    if _is_signalled(plan):
        yield f"signal=B:USR1@{settings.stop_seconds}"
    yield f"output={directory / plan.name}-%j.out"
    yield "open-mode=append"
    yield "requeue" if plan.max_restarts else "no-requeue"


def _is_signalled(plan: LaunchPlan) -> bool:
    """True where the job is signalled ahead of a limit: its own, or, where `stop_seconds` is given, the partition's."""
    return plan.time_limit is not None or "stop_seconds" in plan.settings.model_fields_set


def _container_flags(plan: LaunchPlan, directory: Path) -> Iterator[str]:
    settings = plan.settings
    if settings.image is not None:
        mounts = [f"{directory}:{directory}", *(f"{source}:{path}" for path, source in settings.mounts.items())]
        yield f"--container-image={settings.image}"
        yield f"--container-mounts={','.join(mounts)}"


def _clock(seconds: int) -> str:
    """Return the time as sbatch takes it, rounded up to whole minutes as Slurm counts."""
    minutes = -(-seconds // 60)
    days, rest = divmod(minutes, 24 * 60)
    return f"{days}-{rest // 60:02d}:{rest % 60:02d}:00"


def _number(record: LaunchRecord) -> tuple[str, list[str]]:
    """Return the number of a job, and the option for its cluster where sbatch has named one."""
    number, _, cluster = record.identifier.partition(";")
    return number, ["--clusters", cluster] if cluster else []
