"""A training job before it is started: what both versions of the SDK come to, checked before anything leaves here.

`check` judges everything: files, SMP's options against the instances, the service's limits. `submit` then uploads and
starts the job; `shardwise.sagemaker.local` lays the same draft out on this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError
from shardwise.sagemaker.client import ServiceClient
from shardwise.sagemaker.container import CHECKPOINTS, CODE_CHANNEL, PROGRAM, SOURCE_ARCHIVE
from shardwise.sagemaker.distribution import EstimatorDistribution
from shardwise.sagemaker.inputs import NamedInputs
from shardwise.sagemaker.request import CHECKPOINT_PATH, TrainingJob, proper_name, training_request
from shardwise.sagemaker.shapes import Channel, DataSource, S3DataSource
from shardwise.sagemaker.source import SourceFiles
from shardwise.words import listed

LOCAL_TYPES = ("local", "local_cpu", "local_gpu")
SUBMIT_DIRECTORY, JOB_NAME, REGION = "sagemaker_submit_directory", "sagemaker_job_name", "sagemaker_region"
ENTRYPOINT = ("shardwise", "train")  # whatever the image starts by itself
NOWHERE = "s3://bucket"  # stands for what is not uploaded yet, while a draft is checked
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class TrainingDraft:
    """A job whose files are still on this machine.

    Attributes:
        job: complete but for the channels and what is uploaded.
        source: the user's files.
        inputs: by the names of their channels.
        distribution: how its ranks are started.
        upload_uri: prefix in S3 for what is uploaded; None: the account's default bucket.
    """

    job: TrainingJob
    source: SourceFiles
    inputs: NamedInputs = field(default_factory=dict)
    distribution: EstimatorDistribution = field(default_factory=EstimatorDistribution)
    upload_uri: str | None = None

    @property
    def is_local(self) -> bool:
        """True where the job runs on this machine."""
        return self.job.instance_type in LOCAL_TYPES

    def check(self) -> list[str]:
        """Refuse what cannot run, and return what has no effect.

        Raises:
            ConfigError: a file is missing, an option wrong, or the service would refuse the request.
            LegalityError: SMP's options do not fit the instances.
        """
        self.source.check()
        if CODE_CHANNEL in self.inputs:
            raise ConfigError(f"input {CODE_CHANNEL!r}: this channel holds source_dir; give it another name")
        self._check_groups()
        notes = list(self.distribution.notes)
        if self.distribution.options is not None:
            notes += self._check_layout(self.distribution.options)
        if not self.is_local:
            training_request(self.placed(NOWHERE))
        return notes

    def placed(self, prefix: str) -> TrainingJob:
        """Return the job with the channels that it has once the user's files lie below `prefix`."""
        channels = [
            _channel(name, f"{prefix}/input/{name}") if isinstance(value, Path) else _named(value, name)
            for name, value in self.inputs.items()
        ]
        if self.source.directory or self.source.entry_point:
            uri = self.source.directory if self.source.is_remote else f"{prefix}/source/{SOURCE_ARCHIVE}"
            channels.append(_channel(CODE_CHANNEL, str(uri)))
            submitted = {SUBMIT_DIRECTORY: uri}
        else:
            submitted = {}
        hyperparameters = {**self.job.hyperparameters, **submitted, JOB_NAME: self.job.name}
        if self.source.program is not None:
            hyperparameters[PROGRAM] = self.source.program
        if self.job.checkpoint_path != CHECKPOINT_PATH:  # nothing else in the container tells
            hyperparameters[CHECKPOINTS] = self.job.checkpoint_path
        return replace(
            self.job,
            channels=channels,
            hyperparameters=hyperparameters,
            environment={**self.distribution.environment, **self.job.environment},
            entrypoint=self.job.entrypoint or ENTRYPOINT,
            output_path=self.job.output_path or prefix,
        )

    def request(self, prefix: str = NOWHERE) -> dict[str, Any]:
        """Return the body of CreateTrainingJob once the user's files lie below `prefix`."""
        return training_request(self.placed(prefix))

    def submit(self, client: ServiceClient, say: Say) -> str:
        """Upload the user's files, start the job and return its name.

        Raises:
            MachineError: the service cannot be reached or refuses something; no job was started then.
        """
        prefix = (self.upload_uri or f"s3://{client.default_bucket()}").rstrip("/") + f"/{self.job.name}"
        request = training_request(replace(self.placed(prefix), role=client.role(self.job.role)))
        request["HyperParameters"][REGION] = f'"{client.region}"'
        if not self.source.is_remote and (self.source.directory or self.source.entry_point):
            client.upload(self.source.archive(), f"{prefix}/source/{SOURCE_ARCHIVE}")
        for name, path in self.inputs.items():
            if isinstance(path, Path):
                say(f"upload {path} as channel {name}")
                client.upload_directory(path, f"{prefix}/input/{name}")
        client.start(request)
        say(f"started training job {self.job.name}")
        return self.job.name

    def _check_groups(self) -> None:
        names = [group.instance_group_name for group in self.job.instance_groups]
        for name in self.distribution.groups:
            if name not in names:
                raise ConfigError(
                    f"distribution.instance_groups=[{name!r}]: the job has {listed(names) or 'no instance groups'}; "
                    "name one of instance_groups, or leave it out"
                )

    def _check_layout(self, options: Mapping[str, Any]) -> list[str]:
        from shardwise.sagemaker.layout import check_smp_options, world_of_instances  # imports torch

        if self.is_local:  # as many ranks as are asked for, on whatever this machine has
            return []
        groups = [group for group in self.job.instance_groups if group.instance_group_name in self.distribution.groups]
        if self.job.instance_groups and not groups:
            groups = list(self.job.instance_groups)
        if len({group.instance_type for group in groups}) > 1:
            raise ConfigError("distribution: instance groups of several types; name one of them as instance_groups")
        kind = groups[0].instance_type if groups else self.job.instance_type
        count = sum(group.instance_count for group in groups) or self.job.instance_count
        return check_smp_options(options, world_of_instances(str(kind), count, self.distribution.processes))


def timed_name(base: str) -> str:
    """Return a name for a job that no other has: `base` and the time, to the millisecond."""
    now = datetime.now(UTC)
    return proper_name(base, now.strftime("-%Y-%m-%d-%H-%M-%S-") + f"{now.microsecond // 1000:03d}")


def image_name(image: str | None) -> str:
    """Return the repository of an image, for the names of its jobs."""
    return (image or "shardwise").rpartition("/")[2].partition(":")[0].partition("@")[0]


def _channel(name: str, uri: str) -> Channel:
    return Channel(channel_name=name, data_source=DataSource(s3_data_source=S3DataSource(s3_uri=uri)))


def _named(channel: Channel, name: str) -> Channel:
    return channel if channel.channel_name == name else channel.model_copy(update={"channel_name": name})
