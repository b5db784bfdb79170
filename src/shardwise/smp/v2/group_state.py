"""State of shard groups that are not the whole world, in torch's own functions that scripts save and load with.

`load_sharded_optimizer_state_dict` deals the state over all ranks; SMP's build of torch takes the `process_group` over
which the script's model is sharded. FSDP's `LOCAL_STATE_DICT` names the shards of such a group by their places in it,
and torch (2.11, 2.13) then looks for global ranks: groups that do not begin at rank 0 fail. With `use_orig_params`, in
groups of any ranks, it saves each shard twice, flat and under the parameters' names, and does not take the flat one
back. `save_state_dict` and `load_state_dict` took the coordinator by its global rank, and take it by its place now.
`optim_state_dict_to_load` took the state first until torch 2.0, the first that SMP came with: its scripts still do.
Scripts import the functions before `tsm.init`, so they are changed when `torch.sagemaker` is imported, for good; a call
for all ranks reaches torch as it is.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint import optimizer as optimizer_files
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.fsdp import FullyShardedDataParallel

from shardwise._torch_compat.fsdp1 import (
    Shard,
    create_chunk_sharded_tensor,
    fsdp_state_dicts,
    unflatten_state_dict,
    uses_original_parameters,
    wrap_local_load_hook,
)
from shardwise.errors import CheckpointError

_PLACE, METADATA = "process_group", ".metadata"
_files: Any = optimizer_files
_hooks: Any = fsdp_state_dicts
_fsdp: Any = FullyShardedDataParallel
# The order of FSDP.optim_state_dict_to_load in torch 2.0.
_OLD_ORDER = ("optim_state_dict", "model", "optim", "is_named_optimizer", "load_directly", "group")


def take_groups_of_any_ranks() -> None:
    """Change torch's functions, for good; a second call does nothing."""
    if _PLACE not in inspect.signature(_files.load_sharded_optimizer_state_dict).parameters:
        _files.load_sharded_optimizer_state_dict = _with_group(_files.load_sharded_optimizer_state_dict)
    if not hasattr(_hooks.init_from_local_shards, "__wrapped__"):
        _hooks.init_from_local_shards = _with_global_ranks(_hooks.init_from_local_shards)
    wrap_local_load_hook(_without_flat)
    if not hasattr(_fsdp.optim_state_dict_to_load, "__wrapped__"):
        _fsdp.optim_state_dict_to_load = staticmethod(_in_either_order(_fsdp.optim_state_dict_to_load))
    for module, name in ((state_dict_saver, "save_state_dict"), (state_dict_loader, "load_state_dict")):
        if "coordinator" not in vars(getattr(module, name)):
            changed = _with_coordinator(getattr(module, name))
            for namespace in (module, checkpoint):
                setattr(namespace, name, changed)


def _with_coordinator(function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs)
        _check_there(arguments.arguments.get("storage_reader"))
        group, rank = arguments.arguments.get(_PLACE), arguments.arguments.get("coordinator_rank", 0)
        members = dist.get_process_group_ranks(group) if group is not None else []
        if rank in members:  # whichever is meant: all members choose the same one
            arguments.arguments["coordinator_rank"] = members.index(rank)
        return function(*arguments.args, **arguments.kwargs)

    vars(call)["coordinator"] = True
    return call


def _check_there(reader: Any) -> None:
    """Raise CheckpointError where torch's own reader has no checkpoint: torch's error does not say so."""
    if type(reader) is not checkpoint.FileSystemReader or (Path(reader.path) / METADATA).is_file():
        return
    parts = sorted(path.parent.name for path in Path(reader.path).glob(f"*/{METADATA}"))
    ways = f", and {', '.join(parts)} below it: it was saved at other degrees, use those" if parts else ""
    raise CheckpointError(f"{reader.path} holds no {METADATA} of a finished checkpoint{ways}")


def _in_either_order(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def call(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], Mapping):
            return load(**dict(zip(_OLD_ORDER, args, strict=False)), **kwargs)
        return load(*args, **kwargs)

    return call


def _with_group(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def call(
        model_state_dict: Any, optimizer_key: str, storage_reader: Any, planner: Any = None, process_group: Any = None
    ) -> Any:
        if process_group is None or dist.get_world_size(process_group) == dist.get_world_size():
            return load(model_state_dict, optimizer_key, storage_reader, planner)
        return _load_in_group(optimizer_key, storage_reader, planner, process_group)

    call.__signature__ = inspect.signature(call, follow_wrapped=False)  # type: ignore[attr-defined]
    return call


def _load_in_group(key: str, reader: Any, planner: Any, group: dist.ProcessGroup) -> Any:
    """The optimizer's state in chunks along dim 0 over `group`, each rank reading its own."""
    metadata = reader.read_metadata()
    places = metadata.planner_data
    wanted = {name: entry for name, entry in metadata.state_dict_metadata.items() if places[name][0] == key}
    state = {name: _empty(entry, group) for name, entry in wanted.items()}
    checkpoint.load(state, storage_reader=reader, planner=planner, no_dist=True)
    return unflatten_state_dict(state, places)


def _empty(entry: TensorStorageMetadata | BytesStorageMetadata, group: dist.ProcessGroup) -> Any:
    """Return what the entry is read into: a tensor in chunks, a whole one of a single element, or any other value."""
    if isinstance(entry, BytesStorageMetadata):
        return None
    device = "cuda" if torch.cuda.is_available() and dist.get_backend(group) == "nccl" else "cpu"
    whole = torch.empty(entry.size, dtype=entry.properties.dtype, device=device)
    if entry.size.numel() == 1:
        return whole
    devices = torch.cuda.device_count() if device == "cuda" else dist.get_world_size()
    return create_chunk_sharded_tensor(whole, dist.get_rank(group), dist.get_world_size(group), devices, group)


def _with_global_ranks(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def call(local_shards: list[Shard], *size: Any, process_group: Any = None, **kwargs: Any) -> Any:
        rank = dist.get_rank()
        named = [
            Shard.from_tensor_and_offsets(shard.tensor, shard.metadata.shard_offsets, rank) for shard in local_shards
        ]
        return make(named, *size, process_group=process_group, **kwargs)

    return call


def _without_flat(prepare: Callable[..., Any]) -> Callable[..., Any]:
    """Under `use_orig_params` the shard is loaded by its parameters' names: its flat form is no parameter there."""

    @functools.wraps(prepare)
    def call(module: Any, fsdp_state: Any, state_dict: dict[str, Any], prefix: str) -> None:
        prepare(module, fsdp_state, state_dict, prefix)
        if uses_original_parameters(fsdp_state):
            state_dict.pop(f"{prefix}{_hooks.FSDP_PREFIX}{_hooks.FLAT_PARAM}", None)

    return call
