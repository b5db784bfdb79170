"""Checkpoints of SMP 2.0 to 2.5: one file for each rank, with its own shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.errors import CheckpointError
from shardwise.smp.v2.distributed.checkpoint.state_dict_utils import (
    SMStateDictType,
    init_optim_state,
    sm_state_dict_type,
)
from shardwise.smp.v2.logger import get_logger
from shardwise.smp.v2.session import state

EXPORT_KEY_MODEL, EXPORT_KEY_OPTIMIZER, EXPORT_KEY_SCHEDULER = "model", "optimizer", "scheduler"
EXPORT_KEY_IDENTITY = "identity"
KEYS = (EXPORT_KEY_MODEL, EXPORT_KEY_OPTIMIZER, EXPORT_KEY_SCHEDULER, EXPORT_KEY_IDENTITY)


def save_model_checkpoint(
    model: nn.Module, state_dict_type: Any, dir: str, sharding_strategy: Any, pg_metadata: Any,
    log: bool = False, optimizer: Any = None, scheduler: Any = None, extra_exports: Any = None,
) -> None:  # fmt: skip
    """Write this rank's shards to `<dir>/<rank>.pt`; `state_dict_type`, strategy and groups are noted, not used."""
    with sm_state_dict_type(model, SMStateDictType.SM_LOCAL_STATE_DICT):
        content = {EXPORT_KEY_MODEL: model.state_dict(), EXPORT_KEY_IDENTITY: _identity(sharding_strategy)}
    if optimizer is not None:
        content[EXPORT_KEY_OPTIMIZER] = optimizer.state_dict()
    if scheduler is not None:
        content[EXPORT_KEY_SCHEDULER] = scheduler.state_dict()
    file = _file(dir)
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content | dict(extra_exports or {}), file)
    if log:
        get_logger().info("wrote %s", file)


def load_model_checkpoint(
    model: nn.Module, state_dict_type: Any, dir: str, sharding_strategy: Any, pg_metadata: Any,
    log: bool = False, optimizer: Any = None, scheduler: Any = None, extra_imports: Any = None,
) -> dict[str, Any]:  # fmt: skip
    """Read what `save_model_checkpoint` wrote into model, optimizer and scheduler.

    Returns:
        Those three under their keys, and under `identity` what was exported beside them, with `extra_imports` for what
        was not, and with `epoch` 0 where neither has one: public scripts ask for it and do not export it.

    Raises:
        CheckpointError: there is no file of this rank, it is no plain data, of another writer, or of other degrees.
    """
    file = _file(dir)
    try:
        content: dict[str, Any] = torch.load(file, weights_only=True, map_location=state.device)
    except Exception as error:  # of the file, of torch, or of pickle, which is not imported
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    _check_keys(file, content, optimizer, scheduler)
    saved_identity, identity = content[EXPORT_KEY_IDENTITY], _identity(sharding_strategy)
    if saved_identity != identity:
        raise CheckpointError(f"{file} is of {saved_identity}, and this run is {identity}; use the same degrees")
    with sm_state_dict_type(model, SMStateDictType.SM_LOCAL_STATE_DICT):
        model.load_state_dict(content[EXPORT_KEY_MODEL])
    if optimizer is not None:
        init_optim_state(optimizer)
        optimizer.load_state_dict(content[EXPORT_KEY_OPTIMIZER])
    if scheduler is not None:
        scheduler.load_state_dict(content[EXPORT_KEY_SCHEDULER])
    if log:
        get_logger().info("read %s", file)
    exports = {name: value for name, value in content.items() if name not in KEYS}
    loaded = {EXPORT_KEY_MODEL: model, EXPORT_KEY_OPTIMIZER: optimizer, EXPORT_KEY_SCHEDULER: scheduler}
    return loaded | {EXPORT_KEY_IDENTITY: {"epoch": 0} | dict(extra_imports or {}) | exports}


def _check_keys(file: Path, content: Any, optimizer: Any, scheduler: Any) -> None:
    asked = {EXPORT_KEY_OPTIMIZER: optimizer, EXPORT_KEY_SCHEDULER: scheduler}
    needed = [EXPORT_KEY_MODEL, EXPORT_KEY_IDENTITY, *(key for key, value in asked.items() if value is not None)]
    missing = [key for key in needed if not isinstance(content, dict) or key not in content]
    if missing:
        raise CheckpointError(
            f"{file} has no {', '.join(missing)}: save_model_checkpoint did not write it so; load it with what wrote it"
        )


def _file(directory: str) -> Path:
    return Path(directory) / f"{state.rank}.pt"


def _identity(strategy: Any) -> dict[str, Any]:
    return {"strategy": str(strategy), **{str(axis): degree for axis, degree in state.layout.degrees.items()}}
