"""A training job of SageMaker as its API takes it: the body of `CreateTrainingJob`, and the limits that it has.

`TrainingJob` says what is wanted in the API's own words. `training_request` makes the body of the request, with what is
not set left out, so that it can be written to a file, compared, or sent by any client. What the service would refuse
after the upload is refused here: names, counts and lengths, secrets in clear text. Nothing here imports an SDK.

Limits are those of the service's model in botocore 1.43 (operation CreateTrainingJob).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from shardwise.errors import ConfigError
from shardwise.job.secret_forms import is_secret
from shardwise.sagemaker.shapes import Channel, InstanceGroup, given

NAME = re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}")
CHANNEL_NAME = re.compile(r"[A-Za-z0-9.\-_]{1,64}")
VARIABLE = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]{0,511}")
MOST_HYPERPARAMETERS, LONGEST_HYPERPARAMETER, LONGEST_HYPERPARAMETER_NAME = 100, 2500, 256
MOST_VARIABLES, LONGEST_VARIABLE = 100, 512
MOST_CHANNELS, MOST_METRICS, MOST_TAGS = 20, 40, 50
CHECKPOINT_PATH = "/opt/ml/checkpoints"


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """A training job of SageMaker.

    Attributes:
        name: of the job; letters, digits and hyphens, at most 63.
        role: ARN of the IAM role that the containers have.
        image: URI of the container's image.
        output_path: S3 URI below which model and output are written.
        hyperparameters: values of any kind, which travel as JSON text.
        encoded: hyperparameters that travel as they are.
        entrypoint, arguments: of the container; unset: the image's own, with `train`.
        max_run, max_wait, max_pending: seconds; `max_wait` is for spot instances.
        metrics: regular expressions by the name of the metric.
        more: other members of the request, in the API's words (VpcConfig, RetryStrategy …).
    """

    name: str
    role: str
    image: str
    output_path: str
    instance_type: str | None = None
    instance_count: int = 1
    instance_groups: Sequence[InstanceGroup] = ()
    volume_gb: int = 30
    keep_alive_seconds: int | None = None
    training_plan: str | None = None
    placement: Mapping[str, Any] | None = None
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    encoded: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    channels: Sequence[Channel] = ()
    input_mode: str = "File"
    entrypoint: Sequence[str] = ()
    arguments: Sequence[str] = ()
    image_config: Mapping[str, Any] | None = None
    metrics: Mapping[str, str] = field(default_factory=dict)
    metrics_time_series: bool | None = None
    output_key: str | None = None
    output_compression: Literal["GZIP", "NONE"] | None = None
    volume_key: str | None = None
    checkpoint_uri: str | None = None
    checkpoint_path: str = CHECKPOINT_PATH
    max_run: int = 86_400
    max_wait: int | None = None
    max_pending: int | None = None
    spot: bool = False
    tags: Mapping[str, str] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)


def training_request(job: TrainingJob) -> dict[str, Any]:
    """Return the body of `CreateTrainingJob` for `job`.

    Raises:
        ConfigError: what the service would refuse: with the argument, its value, the limit and the fix.
    """
    _check(job)
    return given(
        TrainingJobName=job.name,
        HyperParameters=encoded_hyperparameters(job),
        AlgorithmSpecification=_algorithm(job),
        RoleArn=job.role,
        InputDataConfig=[channel.body() for channel in job.channels],
        OutputDataConfig=given(
            S3OutputPath=job.output_path, KmsKeyId=job.output_key, CompressionType=job.output_compression
        ),
        ResourceConfig=_resources(job),
        StoppingCondition=given(
            MaxRuntimeInSeconds=job.max_run,
            MaxWaitTimeInSeconds=job.max_wait,
            MaxPendingTimeInSeconds=job.max_pending,
        ),
        Tags=[{"Key": key, "Value": value} for key, value in job.tags.items()],
        EnableManagedSpotTraining=job.spot or None,
        CheckpointConfig=None
        if job.checkpoint_uri is None
        else {"S3Uri": job.checkpoint_uri, "LocalPath": job.checkpoint_path},
        Environment=dict(job.environment),
        **job.more,
    )


def encoded_hyperparameters(job: TrainingJob) -> dict[str, str]:
    """Return the hyperparameters as text: JSON, so that a string has its quotes, as the estimators of the SDK do.

    Raises:
        ConfigError: JSON has no such value.
    """
    return {name: _json_of(name, value) for name, value in job.hyperparameters.items()} | dict(job.encoded)


def _json_of(name: str, value: Any) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"hyperparameter {name}: {error}; give text, a number, a bool, or a list or mapping of these"
        ) from None


def _algorithm(job: TrainingJob) -> dict[str, Any]:
    return given(
        TrainingImage=job.image,
        TrainingInputMode=job.input_mode,
        MetricDefinitions=[{"Name": name, "Regex": regex} for name, regex in job.metrics.items()],
        EnableSageMakerMetricsTimeSeries=job.metrics_time_series,
        ContainerEntrypoint=list(job.entrypoint),
        ContainerArguments=list(job.arguments),
        TrainingImageConfig=job.image_config,
    )


def _resources(job: TrainingJob) -> dict[str, Any]:
    groups = [group.body() for group in job.instance_groups]
    return given(
        InstanceType=None if groups else job.instance_type,
        InstanceCount=None if groups else job.instance_count,
        InstanceGroups=groups,
        VolumeSizeInGB=job.volume_gb,
        VolumeKmsKeyId=job.volume_key,
        KeepAlivePeriodInSeconds=job.keep_alive_seconds,
        TrainingPlanArn=job.training_plan,
        InstancePlacementConfig=job.placement,
    )


# ------------------------------------------------------------------------------------------------------------- limits


def _check(job: TrainingJob) -> None:
    if not NAME.fullmatch(job.name) or len(job.name) > 63:
        raise ConfigError(
            f"job name {job.name!r}: SageMaker takes letters, digits and hyphens between them, at most 63; "
            f"use {proper_name(job.name)!r}"
        )
    if not job.instance_groups and not job.instance_type:
        raise ConfigError("instance_type is not given; give e.g. 'ml.p5.48xlarge', or instance_groups")
    if job.instance_count < 1:
        raise ConfigError(f"instance_count={job.instance_count}: must be a whole number from 1; use 1 or more")
    if job.checkpoint_uri is None and job.checkpoint_path != CHECKPOINT_PATH:
        raise ConfigError(
            f"the local path of checkpoints {job.checkpoint_path!r} is kept at no place in S3; give its S3 URI too"
        )
    _check_times(job)
    _check_texts(job)
    for what, items, most in (
        ("inputs", job.channels, MOST_CHANNELS),
        ("metric_definitions", job.metrics, MOST_METRICS),
        ("tags", job.tags, MOST_TAGS),
        ("hyperparameters", [*job.hyperparameters, *job.encoded], MOST_HYPERPARAMETERS),
        ("environment", job.environment, MOST_VARIABLES),
    ):
        if len(items) > most:
            raise ConfigError(f"{what}: {len(items)} are given, SageMaker takes {most} at most; leave some out")
    for channel in job.channels:
        if not CHANNEL_NAME.fullmatch(channel.channel_name):
            raise ConfigError(
                f"input {channel.channel_name!r}: a channel has letters, digits, '.', '-' and '_', at most 64"
            )


def _check_times(job: TrainingJob) -> None:
    if job.max_wait is not None and not job.spot:
        raise ConfigError(f"max_wait={job.max_wait} is for spot instances; set use_spot_instances, or leave it out")
    if job.spot and (job.max_wait is None or job.max_wait < job.max_run):
        raise ConfigError(
            f"max_wait={job.max_wait}: spot instances are waited for at least as long as the job may run; use "
            f"max_wait={job.max_run} or more"
        )


def _check_texts(job: TrainingJob) -> None:
    for name, text in encoded_hyperparameters(job).items():
        if len(text) > LONGEST_HYPERPARAMETER or len(name) > LONGEST_HYPERPARAMETER_NAME:
            raise ConfigError(
                f"hyperparameter {name!r} has {len(text)} characters as JSON, SageMaker takes "
                f"{LONGEST_HYPERPARAMETER}; put it into a file of source_dir or of a channel"
            )
    for name, text in job.environment.items():
        if not VARIABLE.fullmatch(name) or len(text) > LONGEST_VARIABLE:
            raise ConfigError(
                f"environment {name!r}: names have letters, digits and '_', values at most {LONGEST_VARIABLE} "
                f"characters; this one has {len(text)}"
            )
    refuse_secrets("environment", job.environment)
    refuse_secrets("hyperparameters", {**job.hyperparameters, **job.encoded})
    refuse_secrets("tags", job.tags)


def proper_name(text: str, suffix: str = "") -> str:
    """Return `text` as the name of a job, cut so that `suffix` fits behind it."""
    words = re.sub(r"[^a-zA-Z0-9]+", "-", text).strip("-") or "shardwise"
    return words[: 63 - len(suffix)].rstrip("-") + suffix


def refuse_secrets(argument: str, values: Mapping[str, Any]) -> None:
    """Refuse secrets in clear text: whoever may describe the job could read them.

    Raises:
        ConfigError: names the entry and never its value.
    """
    for name, value in values.items():
        if is_secret(name, value):
            raise ConfigError(
                f"{argument}: {name} looks like a secret in clear text, which everybody who may describe the job can "
                "read; keep it in AWS Secrets Manager or Parameter Store, give its ARN here and read it in the job"
            )
