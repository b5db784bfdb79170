"""A training job on this machine, laid out and started as SageMaker would, without docker.

Each host is a directory that stands for its `/opt/ml` and a process that is started as the service starts an image. The
hosts meet on the loopback interface. Artifacts are packed as the service packs them.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError, WorkerError
from shardwise.errors.exit_codes import STOPPED
from shardwise.sagemaker.client import ServiceClient
from shardwise.sagemaker.container import CODE_CHANNEL, SOURCE_ARCHIVE, below_base
from shardwise.sagemaker.draft import TrainingDraft
from shardwise.sagemaker.failure import BASE, BASE_VARIABLE
from shardwise.sagemaker.request import TrainingJob, encoded_hyperparameters
from shardwise.sagemaker.shapes import Channel

ROOT = "sagemaker_local"
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID")
STOP_SECONDS = 120  # as the service waits between SIGTERM and SIGKILL
GRACE_SECONDS = 20.0  # in which hosts end by themselves after another's failure
Say = Callable[[str], None]


@dataclass(frozen=True)
class LocalRun:
    """A finished job of this machine.

    Attributes:
        directory: the hosts' directories, and the artifacts.
        model_data: the model, as a URI of its archive; None where there is none.
        output_data: the archive of what was written to `output/data`; None where nothing was.
        stopped: it ended early by a signal, with a checkpoint.
    """

    directory: Path
    model_data: str | None
    output_data: str | None
    stopped: bool


def run_in_place(draft: TrainingDraft, root: Path, client: ServiceClient, say: Say, with_logs: bool) -> LocalRun:
    """Run a job on this machine; returns when its hosts have ended.

    Args:
        draft: checked.
        root: directory below which the hosts' directories are made.
        client: used only where an input lies in S3.
        say: takes what the hosts print, a line at a time.
        with_logs: whether it does.

    Raises:
        ConfigError: something that only the service has is asked for.
        WorkerError: a host failed, with the reason that it left.
    """
    job = draft.placed("s3://local")
    _check_checkpoints(job)
    directory = root / job.name
    hosts = [f"algo-{number}" for number in range(1, job.instance_count + 1)]
    for host in hosts:
        _lay_out(draft, job, directory / host, host, hosts, client)
    codes = _run_hosts(job, directory, hosts, say if with_logs else _silent)
    failed = {host: code for host, code in codes.items() if code not in (0, STOPPED)}
    if failed:
        raise _failure_of(directory, failed)
    target = _artifact_directory(job, directory)
    model = _packed(target / "model.tar.gz", [directory / host / "model" for host in hosts])
    output = _packed(target / "output.tar.gz", [directory / host / "output" / "data" for host in hosts])
    return LocalRun(directory, model, output, stopped=STOPPED in codes.values())


# ----------------------------------------------------------------------------------------------------------- the layout


def _lay_out(
    draft: TrainingDraft, job: TrainingJob, base: Path, host: str, hosts: Sequence[str], client: ServiceClient
) -> None:
    """Write what the service puts into the container of a host."""
    config, data = base / "input" / "config", base / "input" / "data"
    for directory in (config, data, base / "model", base / "output" / "data"):
        directory.mkdir(parents=True, exist_ok=True)
    hyperparameters = encoded_hyperparameters(job)
    resources = {
        "current_host": host,
        "current_instance_type": job.instance_type,
        "current_group_name": "homogeneousCluster",
        "hosts": list(hosts),
        "network_interface_name": "lo",
    }
    inputs = {channel.channel_name: _channel_config(channel, job) for channel in job.channels}
    for name, content in (
        ("hyperparameters", hyperparameters), ("resourceconfig", resources), ("inputdataconfig", inputs)
    ):  # fmt: skip
        (config / f"{name}.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    for channel in job.channels:
        _fill_channel(draft, channel, data / channel.channel_name, client)
    _link_checkpoints(job, base)


def _channel_config(channel: Channel, job: TrainingJob) -> dict[str, Any]:
    return {
        "TrainingInputMode": channel.input_mode or job.input_mode,
        "S3DistributionType": "FullyReplicated",
        "RecordWrapperType": channel.record_wrapper_type or "None",
        **({"ContentType": channel.content_type} if channel.content_type else {}),
    }


def _fill_channel(draft: TrainingDraft, channel: Channel, target: Path, client: ServiceClient) -> None:
    name = channel.channel_name
    if name == CODE_CHANNEL and not draft.source.is_remote:
        target.mkdir(exist_ok=True)
        files = replace(draft.source, ignored=(*draft.source.ignored, "requirements.txt"))  # this environment stays
        (target / SOURCE_ARCHIVE).write_bytes(files.archive())
        return
    given = draft.inputs.get(name)
    if isinstance(given, Path):
        target.parent.mkdir(parents=True, exist_ok=True)
        if given.is_dir():
            target.symlink_to(given, target_is_directory=True)
        else:
            target.mkdir()
            (target / given.name).symlink_to(given)
        return
    source = channel.data_source.s3_data_source
    if source is None or (channel.input_mode or draft.job.input_mode) == "Pipe":
        raise ConfigError(f"input {name!r}: this machine has no such file system or pipe; give a directory or s3://...")
    if source.s3_data_distribution_type == "ShardedByS3Key":
        raise ConfigError(f"input {name!r}: ShardedByS3Key is the service's; use FullyReplicated in local mode")
    target.mkdir(exist_ok=True)
    client.download(source.s3_uri, target)


def _check_checkpoints(job: TrainingJob) -> None:
    if not Path(job.checkpoint_path).is_relative_to(BASE):
        raise ConfigError(
            f"the local path of checkpoints {job.checkpoint_path!r} lies outside of {BASE}, for which a directory of "
            f"this machine stands; use one below {BASE} in local mode"
        )


def _link_checkpoints(job: TrainingJob, base: Path) -> None:
    """Lead the directory of checkpoints to that of this machine which stands for their prefix in S3."""
    if job.checkpoint_uri is None:
        return
    target = below_base(base, job.checkpoint_path)
    target.parent.mkdir(parents=True, exist_ok=True)
    if job.checkpoint_uri.startswith("s3://"):
        target.mkdir()
        return
    directory = Path(job.checkpoint_uri.removeprefix("file://")).expanduser().absolute()
    directory.mkdir(parents=True, exist_ok=True)
    target.symlink_to(directory, target_is_directory=True)


# ------------------------------------------------------------------------------------------------------------ the hosts


def _run_hosts(job: TrainingJob, directory: Path, hosts: Sequence[str], say: Say) -> dict[str, int]:
    """Start the process of each host, wait for all, and return their exit codes. Whatever comes, none is left."""
    port = str(_free_port())
    processes: dict[str, subprocess.Popen[str]] = {}
    readers = []
    try:
        for host in hosts:
            processes[host] = _start(job, directory / host, host, port)
            reader = threading.Thread(target=_relay, args=(processes[host], host, say), daemon=True)
            reader.start()
            readers.append(reader)
        _await_ends(list(processes.values()))
        for reader in readers:
            reader.join()
        return {host: process.wait() for host, process in processes.items()}
    finally:
        for process in processes.values():
            _end(process)


def _await_ends(processes: Sequence[subprocess.Popen[str]]) -> None:
    """Wait for all processes; once one has failed, the others get a while: they may wait for it to come."""
    end: float | None = None
    while any(process.poll() is None for process in processes):
        if end is None and any(process.poll() not in (None, 0, STOPPED) for process in processes):
            end = time.monotonic() + GRACE_SECONDS
        if end is not None and time.monotonic() > end:
            for process in processes:
                _end(process)
        time.sleep(0.1)


def _start(job: TrainingJob, base: Path, host: str, port: str) -> subprocess.Popen[str]:
    words = [*job.entrypoint, *job.arguments]
    if words[0] == "shardwise":
        words[:1] = [sys.executable, "-m", "shardwise"]
    variables = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    variables |= {
        **job.environment,
        BASE_VARIABLE: str(base),
        "TRAINING_JOB_NAME": job.name,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "SHARDWISE_HOST": host,
        "PYTHONUNBUFFERED": "1",
    }
    if job.instance_type != "local_gpu":
        variables["CUDA_VISIBLE_DEVICES"] = ""
    return subprocess.Popen(
        words, cwd=base, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )


def _relay(process: subprocess.Popen[str], host: str, say: Say) -> None:
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            say(f"{host} | {line.rstrip()}")


def _end(process: subprocess.Popen[str]) -> None:
    """Stop a process that still runs as the service stops a container: SIGTERM, and SIGKILL if it does not heed it."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _failure_of(directory: Path, failed: dict[str, int]) -> WorkerError:
    reasons = []
    for host, code in failed.items():
        path = directory / host / "output" / "failure"
        reason = path.read_text(encoding="utf-8") if path.is_file() else "no reason was left"
        reasons.append(f"{host} ended with exit code {code}: {reason}")
    error = WorkerError("\n".join(reasons))
    error.exit_code = max(failed.values())  # below 0 are hosts that were ended because of another
    return error


# -------------------------------------------------------------------------------------------------------- the artifacts


def _artifact_directory(job: TrainingJob, directory: Path) -> Path:
    """Return where the archives go: `output_path`, where that is on this machine."""
    if job.output_path.startswith("s3://"):
        return directory / "artifacts"
    return Path(job.output_path.removeprefix("file://")).expanduser().absolute()


def _packed(archive: Path, directories: Sequence[Path]) -> str | None:
    """Pack what is in the directories of the hosts into one archive; the first host's file of a name is taken."""
    members: dict[str, Path] = {}
    for directory in directories:
        for name, path in _files(directory):
            members.setdefault(name, path)
    if not members:
        return None
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w:gz") as packed:
        for name, path in sorted(members.items()):
            packed.add(path, arcname=name)
    return archive.as_uri()


def _files(directory: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            yield path.relative_to(directory).as_posix(), path


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _silent(text: str) -> None:
    pass
