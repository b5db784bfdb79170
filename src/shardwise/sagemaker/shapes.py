"""Parts of a training job in the words of SageMaker's API and of its Python SDK, version 3.

Each class mirrors a structure of `CreateTrainingJob`: its attributes are the members in snake case, as in
`sagemaker.core.shapes`, and `body` returns them in the API's case. An unknown or mistyped argument is a ConfigError
that names it and the nearest one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shardwise.errors import ConfigError
from shardwise.words import nearest

UNUSUAL_CASE = {"volume_size_in_gb": "VolumeSizeInGB"}


def api_name(attribute: str) -> str:
    """Return the member of the API that an attribute is: `s3_uri` is `S3Uri`."""
    if attribute in UNUSUAL_CASE:
        return UNUSUAL_CASE[attribute]
    return "".join(part[:1].upper() + part[1:] for part in attribute.split("_"))


class Shape(BaseModel):
    """A structure of the API, or of the SDK around it: unknown arguments are refused, assignments checked."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True)

    def __init__(self, **arguments: Any) -> None:
        with _explained(type(self)):
            super().__init__(**arguments)

    def __setattr__(self, name: str, value: Any) -> None:
        with _explained(type(self)):
            super().__setattr__(name, value)

    def body(self) -> dict[str, Any]:
        """Return the structure of the API, without what is not set: it takes neither null nor an empty list."""
        return given(**{api_name(name): _plain(getattr(self, name)) for name in type(self).model_fields})


def given(**members: Any) -> dict[str, Any]:
    """Return the members that are set."""
    return {name: value for name, value in members.items() if value is not None and value not in ([], {})}


def _plain(value: Any) -> Any:
    if isinstance(value, Shape):
        return value.body()
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value


@contextmanager
def _explained(shape: type[Shape]) -> Iterator[None]:
    """Turn pydantic's complaints in the body into a ConfigError."""
    try:
        yield
    except ValidationError as error:
        raise ConfigError(_explanation(shape, error)) from None


def _explanation(shape: type[Shape], error: ValidationError) -> str:
    """Return one line for each complaint of pydantic: class, argument, value, rule."""
    lines = []
    for item in error.errors(include_url=False):
        argument = ".".join(str(part) for part in item["loc"]) or shape.__name__
        if item["type"] == "extra_forbidden":
            lines.append(
                f"{shape.__name__}: unknown argument {argument}.{nearest(argument, shape.model_fields)}",
            )
        elif item["type"] == "missing":
            lines.append(f"{shape.__name__}: {argument} is not given, and has no default")
        else:
            lines.append(f"{shape.__name__}: {argument}={item['input']!r}: {item['msg'].lower()}")
    return "\n".join(dict.fromkeys(lines))


# -------------------------------------------------------------------------------------------------------------- inputs


class S3DataSource(Shape):
    """Objects of S3 as the data of a channel."""

    s3_data_type: Literal["S3Prefix", "ManifestFile", "AugmentedManifestFile", "Converse"] = "S3Prefix"
    s3_uri: str
    s3_data_distribution_type: Literal["FullyReplicated", "ShardedByS3Key"] | None = "FullyReplicated"
    attribute_names: list[str] | None = None
    instance_group_names: list[str] | None = None
    model_access_config: dict[str, Any] | None = None
    hub_access_config: dict[str, Any] | None = None


class FileSystemDataSource(Shape):
    """A directory of EFS or FSx for Lustre as the data of a channel."""

    file_system_id: str
    file_system_access_mode: Literal["ro", "rw"] = "ro"
    file_system_type: Literal["EFS", "FSxLustre"]
    directory_path: str


class DatasetSource(Shape):
    """A data set of a hub as the data of a channel."""

    dataset_arn: str


class DataSource(Shape):
    """One of the three kinds of data."""

    s3_data_source: S3DataSource | None = None
    file_system_data_source: FileSystemDataSource | None = None
    dataset_source: DatasetSource | None = None


class ShuffleConfig(Shape):
    """A seed by which the objects of a channel are shuffled."""

    seed: int


class Channel(Shape):
    """An input of a job, which its containers see as `/opt/ml/input/data/NAME`."""

    channel_name: str
    data_source: DataSource
    content_type: str | None = None
    compression_type: Literal["None", "Gzip"] | None = None
    record_wrapper_type: Literal["None", "RecordIO"] | None = None
    input_mode: Literal["File", "FastFile", "Pipe"] | None = None
    shuffle_config: ShuffleConfig | None = None


# ----------------------------------------------------------------------------------------------------------- instances


class InstanceGroup(Shape):
    """Instances of one type in a job of several types."""

    instance_type: str
    instance_count: int = Field(ge=1)
    instance_group_name: str


class TrainingImageConfig(Shape):
    """Access to a registry of one's own."""

    training_repository_access_mode: Literal["Platform", "Vpc"]
    training_repository_auth_config: dict[str, Any] | None = None


class OutputDataConfig(Shape):
    """The place of a job's model and output."""

    s3_output_path: str | None = None
    kms_key_id: str | None = None
    compression_type: Literal["GZIP", "NONE"] | None = None


class CheckpointConfig(Shape):
    """A prefix of S3 that is kept equal to a directory of the container."""

    s3_uri: str | None = None
    local_path: str = "/opt/ml/checkpoints"


class StoppingCondition(Shape):
    """The seconds that a job may run, wait for spot instances, and wait for a training plan."""

    max_runtime_in_seconds: int | None = Field(default=None, ge=1)
    max_wait_time_in_seconds: int | None = Field(default=None, ge=1)
    max_pending_time_in_seconds: int | None = Field(default=None, ge=1800)


class Tag(Shape):
    """A tag of a job."""

    key: str
    value: str


class MetricDefinition(Shape):
    """A regular expression over the log, whose first group is the value of a metric."""

    name: str
    regex: str


class RetryStrategy(Shape):
    """Attempts after internal faults of the service."""

    maximum_retry_attempts: int = Field(ge=1, le=30)


class TensorBoardOutputConfig(Shape):
    """A prefix of S3 for TensorBoard's files."""

    s3_output_path: str
    local_path: str | None = None


class InfraCheckConfig(Shape):
    """A check of the instances before the job."""

    enable_infra_check: bool | None = None


class RemoteDebugConfig(Shape):
    """A shell in the containers through AWS Systems Manager."""

    enable_remote_debug: bool | None = None


class SessionChainingConfig(Shape):
    """Session tags that the role hands on."""

    enable_session_tag_chaining: bool | None = None


def as_shape(shape: type[Shape], value: Any, argument: str) -> Any:
    """Return `value` as a `shape`: one, or a mapping in either case. None stays.

    Raises:
        ConfigError: it is neither.
    """
    if value is None or isinstance(value, shape):
        return value
    if isinstance(value, Mapping):
        cases = {api_name(name): name for name in shape.model_fields}
        return shape(**{cases.get(str(name), str(name)): part for name, part in value.items()})
    raise ConfigError(f"{argument}={value!r}: must be a {shape.__name__} or a mapping of its arguments")
