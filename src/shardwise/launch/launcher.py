"""From a job to files that start it on a cluster, and to a submitted job.

`launch` checks everything first (keys, secrets, layout, name), then writes, then submits if it is asked to. Without
`submit` nothing leaves the machine. Nothing is overwritten and nothing is submitted twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from shardwise.errors import ConfigError, OutputError, ShardwiseError
from shardwise.job.schema import Job
from shardwise.launch.client import HalfSubmittedError
from shardwise.launch.launch_plan import LaunchPlan, derived_rows, plan_launch
from shardwise.launch.layout_check import check_layout
from shardwise.launch.record import (
    RECORD_FILE,
    SUBMITTED_FILE,
    LaunchRecord,
    claim_submit,
    give_up_submit,
    note_submitted,
    read_record,
    record_text,
)
from shardwise.launch.secrets import refuse_job_secrets
from shardwise.launch.targets.hyperpod import HyperPodTarget
from shardwise.launch.targets.jobset import JobSetTarget
from shardwise.launch.targets.local import LocalTarget
from shardwise.launch.targets.pytorchjob import PyTorchJobTarget
from shardwise.launch.targets.sagemaker import SageMakerTarget
from shardwise.launch.targets.skypilot import SkyPilotTarget
from shardwise.launch.targets.slurm import SlurmTarget
from shardwise.launch.targets.ssh import SshTarget
from shardwise.launch.targets.target import LaunchTarget
from shardwise.launch.targets.trainjob import TrainJobTarget
from shardwise.words import nearest

TARGETS: tuple[LaunchTarget, ...] = (
    SlurmTarget(),
    TrainJobTarget(),
    PyTorchJobTarget(),
    JobSetTarget(),
    HyperPodTarget(),
    SkyPilotTarget(),
    SageMakerTarget(),
    SshTarget(),
    LocalTarget(),
)
BY_NAME: Mapping[str, LaunchTarget] = {target.name: target for target in TARGETS}


@dataclass(frozen=True)
class Launched:
    """A launch whose files are written.

    Attributes:
        plan: what is started where.
        directory: where the files lie.
        files: their names.
        identifier: the target's own name of the job; empty where it was not submitted.
    """

    plan: LaunchPlan
    directory: Path
    files: tuple[str, ...]
    identifier: str = ""


def find_target(name: str) -> LaunchTarget:
    """Return a target by its name.

    Raises:
        ConfigError: there is none of that name; the message has the nearest.
    """
    if name not in BY_NAME:
        raise ConfigError(f"--to={name!r} is no target.{nearest(name, BY_NAME)}")
    return BY_NAME[name]


def plan_for_target(job: Job, target: str, default_name: str = "shardwise") -> LaunchPlan:
    """Return what would be started where; writes nothing.

    Args:
        job: the job, with its `launch` section.
        target: a name of `TARGETS`.
        default_name: the job's name, where its `launch.name` is not set.

    Raises:
        ConfigError: a key that does nothing on the target, a missing one, a secret in clear text.
        LegalityError: the layout does not fit the cluster.
    """
    chosen = find_target(target)
    refuse_job_secrets(job.model_dump(mode="json", exclude_unset=True))
    chosen.check(job)
    where = chosen.find_cluster(job)
    plan = chosen.finish(plan_launch(job, where, default_name))
    others = range(plan.least_nodes or plan.nodes, plan.most_nodes + 1)
    sizes = [where, *(replace(where, nodes=count) for count in others if count != plan.nodes)]
    notes = (*plan.notes, *check_layout(plan.job, sizes))
    return replace(plan, derived=derived_rows(plan, target, chosen.derive(plan)), notes=notes)


def launch(
    job: Job, target: str, output: Path | None = None, submit: bool = False, default_name: str = "shardwise"
) -> Launched:
    """Write the files that start a job on a target, and submit them if asked to.

    Args:
        job: the job, with its `launch` section.
        target: a name of `TARGETS`.
        output: directory of the files; None: `NAME-TARGET` here.
        submit: hand them to the target's own client.
        default_name: the job's name, where its `launch.name` is not set.

    Raises:
        ShardwiseError: whatever a user can mend; nothing was submitted then, unless the message says otherwise.
    """
    plan, chosen = plan_for_target(job, target, default_name), find_target(target)
    directory = (output or Path(f"{plan.name}-{target}")).expanduser().absolute()
    files = dict(chosen.files(plan, directory))
    files[RECORD_FILE] = record_text(target, plan.name, chosen.record(plan))
    write_files(directory, files)
    identifier = submit_record(read_record(directory)) if submit else ""
    return Launched(plan, directory, tuple(files), identifier)


def write_files(directory: Path, files: Mapping[str, str]) -> None:
    """Write files that are not there yet; those that are there already have to be the same.

    Raises:
        OutputError: the directory holds something else, or cannot be written.
    """
    try:
        present = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*") if path.is_file()}
        launched = RECORD_FILE in present
        for name, path in present.items():
            is_other = name in files and path.read_text(encoding="utf-8", errors="replace") != files[name]
            if is_other or (name != SUBMITTED_FILE and not launched):
                raise OutputError(
                    f"output={str(directory)!r} holds another {name}, and nothing is overwritten; give another --output"
                )
        for name, text in files.items():
            path = directory / name
            if name not in present:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
                path.chmod(0o755 if text.startswith("#!") else 0o644)
    except OSError as error:
        raise OutputError(f"output={str(directory)!r}: {error.strerror}; give another --output") from error


def submit_record(record: LaunchRecord) -> str:
    """Submit what a launch wrote, once; returns the target's own name of the job.

    Raises:
        LaunchError: the client is missing or refused; or it was submitted before.
    """
    target = find_target(record.target)
    claim_submit(record)
    try:
        target.check_client(record)
        identifier = target.submit(record)
    except HalfSubmittedError:
        raise
    except ShardwiseError:  # nothing is left on the cluster; of anything else that is not known
        give_up_submit(record)
        raise
    note_submitted(record, identifier)
    return identifier
