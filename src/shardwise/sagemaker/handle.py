"""A started training job, of the service or of this machine, as both versions of the SDK hand it out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError
from shardwise.sagemaker.client import ServiceClient
from shardwise.sagemaker.draft import TrainingDraft
from shardwise.sagemaker.local import ROOT, LocalRun, run_in_place
from shardwise.words import say_note


@dataclass
class TrainingHandle:
    """A job that has been started.

    Attributes:
        name: of the job.
        client: of the service.
        run: what a job of this machine has come to; None of the service's.
    """

    name: str
    client: ServiceClient
    run: LocalRun | None = None

    def describe(self) -> dict[str, Any]:
        """Return what the service says of the job.

        Raises:
            ConfigError: it ran on this machine.
        """
        if self.run is not None:
            raise ConfigError(f"{self.name} ran on this machine, the service knows nothing of it; see {self.run}")
        return self.client.describe(self.name)

    def wait(self, logs: bool = True) -> None:
        """Wait for the end of the job. Raises WorkerError where it fails."""
        if self.run is None:
            self.client.wait(self.name, print, logs)

    def stop(self) -> None:
        """Ask the job to save a checkpoint and end."""
        if self.run is None:
            self.client.stop(self.name)

    @property
    def model_data(self) -> str | None:
        """The URI of the model's archive; None where there is none yet."""
        if self.run is not None:
            return self.run.model_data
        artifacts = self.describe().get("ModelArtifacts") or {}
        return artifacts.get("S3ModelArtifacts")


def start(
    draft: TrainingDraft,
    client: ServiceClient,
    notes: Sequence[str],
    *,
    wait: bool,
    with_logs: bool,
    root: Path | None = None,
) -> TrainingHandle:
    """Check a draft, say what has no effect, and start it on the service or on this machine.

    Raises:
        ConfigError, LegalityError: something is refused, and nothing has been uploaded.
        MachineError: the service cannot be reached.
        WorkerError: the job failed.
    """
    for note in [*notes, *draft.check()]:
        say_note(note)
    if not draft.is_local:
        handle = TrainingHandle(draft.submit(client, print), client)
        if wait:
            handle.wait(with_logs)
        return handle
    for note in _local_notes(draft, wait):
        say_note(note)
    run = run_in_place(draft, root or Path.cwd() / ROOT, client, print, with_logs)
    print(f"{draft.job.name}: model {run.model_data}, output {run.output_data}; its hosts are in {run.directory}")
    return TrainingHandle(draft.job.name, client, run)


def _local_notes(draft: TrainingDraft, wait: bool) -> list[str]:
    """Return what has no effect on this machine, and why."""
    job = draft.job
    of_the_service = {
        "image_uri": job.image,
        "role": job.role,
        "use_spot_instances": job.spot,
        "volume_kms_key": job.volume_key,
        "keep_alive_period_in_seconds": job.keep_alive_seconds,
        "tags": dict(job.tags),
        **job.more,
    }
    idle = [name for name, value in of_the_service.items() if value]
    notes = [f"{', '.join(idle)}: no effect in local mode: the service has them."] if idle else []
    if not wait:
        notes.append("wait=False has no effect in local mode: the job runs in this call.")
    if (job.checkpoint_uri or "").startswith("s3://"):
        notes.append(f"checkpoint_s3_uri={job.checkpoint_uri}: kept beside the host, not in S3; give file://...")
    if job.output_path.startswith("s3://"):
        notes.append(f"output_path={job.output_path}: archives stay on this machine; give file://...")
    return notes
