"""Saving state dicts of SMP's models, at once or while training goes on."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint.planner import SavePlanner

from shardwise._torch_compat.groups import is_alive
from shardwise.errors import CheckpointError, ConfigError
from shardwise.smp.v2.distributed.checkpoint.async_utils import AsyncCallsQueue
from shardwise.smp.v2.distributed.checkpoint.filesystem import DistributedFileSystemWriter, first_failure

_QUEUE = AsyncCallsQueue()
_groups: dict[tuple[int, ...], Any] = {}
_turns: dict[int, threading.Event] = {}  # of each group the last save that was begun: set when it has ended


class PyTorchDistSaveShardedStrategy:
    """SMP's name for how shards are written; there is one way, so it holds nothing."""


def save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: Any = None,
    storage_writer: Any = None,
    planner: SavePlanner | None = None,
    process_group: Any = None,
    coordinator_rank: int = 0,
    wait_error_handling: bool = True,
    force_check_all_plans: bool = True,
    s3_region: str | None = None,
    s3client_config: Any = None,
) -> None:
    """Write `state_dict`, of which each rank of `process_group` holds its shards. Collective over the group.

    Args:
        checkpoint_id: the directory or address in S3, or `storage_writer` that knows it.
        coordinator_rank, wait_error_handling, force_check_all_plans: accepted; torch's coordinator is the group's first
            rank, and all plans are always looked at.
        s3_region, s3client_config: of `S3FileSystem`, for `checkpoint_id`; a `storage_writer` has its own.

    Raises:
        CheckpointError: a rank could not write; every rank is told.
        ConfigError: neither a directory nor a writer is given.
    """
    writer = _writer(checkpoint_id, storage_writer, s3_region, s3client_config)
    _save(state_dict, writer, planner, process_group)


def async_save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: Any = None,
    storage_writer: Any = None,
    planner: SavePlanner | None = None,
    process_group: Any = None,
    coordinator_rank: int = 0,
    queue: AsyncCallsQueue | None = None,
    sharded_strategy: Any = None,
    wait_error_handling: bool = True,
    force_check_all_plans: bool = True,
    s3_region: str | None = None,
    s3client_config: Any = None,
) -> None:
    """As `save`, but only the copy to host memory is waited for; `maybe_finalize_async_calls` tells when it is done.

    The ranks talk over a group of their own, so that messages of training and of the save do not meet. A save begins
    when the one before it in the same group has ended, or their messages would meet.
    """
    writer = _writer(checkpoint_id, storage_writer, s3_region, s3client_config)
    group = _own_group(process_group)
    staged = _staged(state_dict)
    before, ended = _turns.get(id(group)), threading.Event()

    def write() -> None:
        if before is not None:
            before.wait()
        try:
            _save(staged, writer, planner, group)
        finally:
            ended.set()

    (queue or _QUEUE).schedule(write, process_group)
    _turns[id(group)] = ended


def maybe_finalize_async_calls(blocking: bool = True, process_group: Any = None) -> list[int]:
    """As the method of AsyncCallsQueue, of saves that were given no queue."""
    return _QUEUE.maybe_finalize_async_calls(blocking, process_group)


def _save(state_dict: dict[str, Any], writer: Any, planner: SavePlanner | None, group: Any) -> None:
    """Torch's own error is a BaseException, which passes by what a script does against errors."""
    try:
        checkpoint.save(state_dict, storage_writer=writer, planner=planner, process_group=group)
    except checkpoint.CheckpointException as error:
        path = getattr(writer, "path", "storage_writer")
        raise CheckpointError(f"the checkpoint in {path} cannot be written: {first_failure(error)}") from error


def _writer(checkpoint_id: Any, storage_writer: Any, s3_region: str | None, s3client_config: Any) -> Any:
    if storage_writer is not None:
        return storage_writer
    if checkpoint_id is None:
        raise ConfigError("a checkpoint needs checkpoint_id, its directory, or a storage_writer")
    return DistributedFileSystemWriter(checkpoint_id, s3_region=s3_region, s3client_config=s3client_config)


def _own_group(group: Any) -> Any:
    """A Gloo group of the same ranks, made once."""
    ranks = tuple(dist.get_process_group_ranks(group))
    if ranks not in _groups or not is_alive(_groups[ranks]):
        _groups[ranks] = dist.new_group(list(ranks), backend="gloo", use_local_synchronization=True)
    return _groups[ranks]


def _staged(value: Any) -> Any:
    """Return a copy in host memory, which training does not change."""
    if isinstance(value, dict):
        return {key: _staged(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_staged(item) for item in value)
    if hasattr(value, "local_shards"):  # ShardedTensor
        copy = value.cpu()
        for staged, live in zip(copy.local_shards(), value.local_shards(), strict=True):
            if staged.tensor.data_ptr() == live.tensor.data_ptr():
                staged.tensor = live.tensor.detach().clone()
        return copy
    if isinstance(value, Tensor):
        with torch.no_grad():
            host = value.detach().cpu()
            return host.clone() if host.data_ptr() == value.data_ptr() else host
    return value
