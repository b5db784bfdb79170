"""Inputs of a training job in the forms that SageMaker's SDK takes: S3, file systems, and directories of this machine.

A bare value becomes the channel `training`, a mapping a channel for each name. A path of this machine is uploaded for
a job of the service, and used in its place in local mode.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from shardwise.errors import ConfigError
from shardwise.sagemaker.shapes import (
    Channel,
    DatasetSource,
    DataSource,
    FileSystemDataSource,
    S3DataSource,
    Shape,
    ShuffleConfig,
)
from shardwise.words import nearest_file

DEFAULT_CHANNEL = "training"


class TrainingInput(Shape):
    """An input in S3, as version 2 of the SDK has it."""

    s3_data: str
    distribution: Literal["FullyReplicated", "ShardedByS3Key"] = "FullyReplicated"
    compression: Literal["Gzip"] | None = None
    content_type: str | None = None
    record_wrapping: Literal["RecordIO"] | None = None
    s3_data_type: Literal["S3Prefix", "ManifestFile", "AugmentedManifestFile"] = "S3Prefix"
    instance_groups: list[str] | None = None
    input_mode: Literal["File", "FastFile", "Pipe"] | None = None
    attribute_names: list[str] | None = None
    target_attribute_name: str | None = None
    shuffle_config: ShuffleConfig | None = None

    def __init__(self, s3_data: str, **settings: Any) -> None:
        super().__init__(s3_data=s3_data, **settings)


class FileSystemInput(Shape):
    """A directory of EFS or FSx for Lustre, as version 2 of the SDK has it."""

    file_system_id: str
    file_system_type: Literal["EFS", "FSxLustre"]
    directory_path: str
    file_system_access_mode: Literal["ro", "rw"] = "ro"
    content_type: str | None = None

    def __init__(self, file_system_id: str, file_system_type: str, directory_path: str, **settings: Any) -> None:
        super().__init__(
            file_system_id=file_system_id, file_system_type=file_system_type, directory_path=directory_path, **settings
        )


class InputData(Shape):
    """An input as version 3 of the SDK has it."""

    channel_name: str
    data_source: str | S3DataSource | FileSystemDataSource | DatasetSource
    content_type: str | None = None


NamedInputs = dict[str, Channel | Path]  # a path is of this machine


def named_inputs(inputs: Any) -> NamedInputs:
    """Return the inputs of `fit` by the names of their channels.

    Raises:
        ConfigError: an input has no known form, or its path does not exist.
    """
    if inputs is None:
        return {}
    if isinstance(inputs, Mapping):
        return {str(name): _input(str(name), value) for name, value in inputs.items()}
    if isinstance(inputs, list | tuple):
        return dict(_listed_input(value) for value in inputs)
    return {DEFAULT_CHANNEL: _input(DEFAULT_CHANNEL, inputs)}


def _listed_input(value: Any) -> tuple[str, Channel | Path]:
    """Return an entry of version 3's `input_data_config`, by its name."""
    if isinstance(value, Channel):
        return value.channel_name, value
    if isinstance(value, InputData):
        channel = _input(value.channel_name, value.data_source)
        if isinstance(channel, Channel) and value.content_type is not None:
            channel = channel.model_copy(update={"content_type": value.content_type})
        return value.channel_name, channel
    raise ConfigError(f"input {value!r}: must be an InputData or a Channel; other inputs stand in a mapping by name")


def _input(name: str, value: Any) -> Channel | Path:
    if isinstance(value, str | Path):
        return _location(name, str(value))
    if isinstance(value, Channel):
        return value
    if isinstance(value, TrainingInput):
        return _s3_channel(name, value)
    if isinstance(value, S3DataSource | FileSystemDataSource | DatasetSource):
        return Channel(channel_name=name, data_source=_data_source(value))
    if hasattr(value, "file_system_id"):
        source = FileSystemDataSource(
            file_system_id=value.file_system_id,
            file_system_access_mode=value.file_system_access_mode,
            file_system_type=value.file_system_type,
            directory_path=value.directory_path,
        )
        return Channel(
            channel_name=name,
            data_source=DataSource(file_system_data_source=source),
            content_type=getattr(value, "content_type", None),
        )
    raise ConfigError(
        f"input {name}={value!r}: must be an S3 URI, a path, a TrainingInput, a FileSystemInput or a Channel"
    )


def _location(name: str, text: str) -> Channel | Path:
    if text.startswith("s3://"):
        return Channel(channel_name=name, data_source=DataSource(s3_data_source=S3DataSource(s3_uri=text)))
    path = Path(text.removeprefix("file://")).expanduser()
    if "://" in text and not text.startswith("file://"):
        raise ConfigError(f"input {name}={text!r}: SageMaker takes s3://..., file systems and paths; copy it there")
    if not path.exists():
        raise ConfigError(f"input {name}={text!r} does not exist.{nearest_file(path)}")
    return path.absolute()


def _s3_channel(name: str, value: TrainingInput) -> Channel | Path:
    location = _location(name, value.s3_data)
    if isinstance(location, Path):
        return location
    source = S3DataSource(
        s3_uri=value.s3_data,
        s3_data_type=value.s3_data_type,
        s3_data_distribution_type=value.distribution,
        attribute_names=value.attribute_names,
        instance_group_names=value.instance_groups,
    )
    return Channel(
        channel_name=name,
        data_source=DataSource(s3_data_source=source),
        content_type=value.content_type,
        compression_type=value.compression,
        record_wrapper_type=value.record_wrapping,
        input_mode=value.input_mode,
        shuffle_config=value.shuffle_config,
    )


def _data_source(value: S3DataSource | FileSystemDataSource | DatasetSource) -> DataSource:
    if isinstance(value, S3DataSource):
        return DataSource(s3_data_source=value)
    if isinstance(value, FileSystemDataSource):
        return DataSource(file_system_data_source=value)
    return DataSource(dataset_source=value)
