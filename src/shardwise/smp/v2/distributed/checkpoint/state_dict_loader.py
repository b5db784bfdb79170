"""Loading state dicts of SMP's models, in place."""

from __future__ import annotations

from typing import Any

from torch.distributed import checkpoint

from shardwise.errors import CheckpointError, ConfigError
from shardwise.smp.v2.distributed.checkpoint.filesystem import DistributedFileSystemReader, LoadPlanner, first_failure


def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: Any = None,
    storage_reader: Any = None,
    planner: Any = None,
    process_group: Any = None,
    check_keys_matched: bool = True,
    coordinator_rank: int = 0,
    s3_region: str | None = None,
    s3client_config: Any = None,
) -> None:
    """Fill the tensors of `state_dict`, and replace its other values. Collective over `process_group`.

    Args:
        checkpoint_id: the directory or address in S3, or `storage_reader` that knows it.
        s3_region, s3client_config: of `S3FileSystem`, for `checkpoint_id`.
        check_keys_matched: whether a key that the checkpoint lacks is an error.

    Raises:
        CheckpointError: there is no checkpoint, it lacks a key, or a shape is another.
        ConfigError: neither a directory nor a reader is given.
    """
    if storage_reader is None and checkpoint_id is None:
        raise ConfigError("a checkpoint needs checkpoint_id, its directory, or a storage_reader")
    reader = storage_reader or DistributedFileSystemReader(checkpoint_id, s3_region, s3client_config)
    planner = planner or LoadPlanner(allow_partial_load=not check_keys_matched)
    try:
        checkpoint.load(state_dict, storage_reader=reader, planner=planner, process_group=process_group)
    except checkpoint.CheckpointException as error:
        # Torch 2.11 swallows it, to say that the metadata is None.
        first = getattr(reader, "problem", None) or first_failure(error)
        path = getattr(reader, "path", checkpoint_id)
        raise CheckpointError(f"the checkpoint in {path} cannot be loaded: {first}") from error
