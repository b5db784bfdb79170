"""FSDP of flat parameters (`FullyShardedDataParallel`), its state dicts and the storage of their checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# No public names: what FSDP's local and sharded state dicts are made of and by (torch 2.11 to 2.13).
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor

# No public name: scripts of SMP import the wrappers from here themselves (torch 2.11 to 2.13).
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, OffloadWrapper

# No public names: how FSDP reduces gradients of parameters that are not sharded (torch 2.11 to 2.13).
from torch.distributed.algorithms._comm_hooks.default_hooks import DefaultState as ReductionState
from torch.distributed.algorithms._comm_hooks.default_hooks import allreduce_hook

# No public names: put a value of a checkpoint, or all of them, into their places in nested dicts (torch 2.11 to 2.13).
from torch.distributed.checkpoint._nested_dict import set_element as set_state_element
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict

# No public name: where torch's file system storage says that a chunk lies (torch 2.11 to 2.13).
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp import _state_dict_utils as fsdp_state_dicts
from torch.distributed.fsdp._common_utils import clean_tensor_name
from torch.distributed.fsdp._shard_utils import _create_chunk_sharded_tensor as create_chunk_sharded_tensor

__all__ = [
    "CheckpointWrapper",
    "OffloadWrapper",
    "ReductionState",
    "Shard",
    "ShardedTensor",
    "StorageInfo",
    "allreduce_hook",
    "clean_tensor_name",
    "create_chunk_sharded_tensor",
    "fsdp_state_dicts",
    "hybrid_strategies",
    "set_reduction_hook",
    "set_state_element",
    "unflatten_state_dict",
    "uses_original_parameters",
    "wrap_local_load_hook",
]

# FSDP's strategies of shard groups and replicas; the second has a private name in torch 2.11 to 2.13.
hybrid_strategies = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)


def set_reduction_hook(module: Any, hook: Callable[..., Any], state: Any) -> None:
    """Let FSDP reduce the gradients of `module` by `hook(state, gradient)`, for a module that has one already too."""
    module._comm_hook, module._comm_hook_state = hook, state


def wrap_local_load_hook(wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put `wrapper` around what FSDP does before it loads a local state dict; once."""
    hook = fsdp_state_dicts._local_pre_load_state_dict_hook
    if not hasattr(hook, "__wrapped__"):
        fsdp_state_dicts._local_pre_load_state_dict_hook = wrapper(hook)


def uses_original_parameters(fsdp_state: Any) -> bool:
    """Return True if FSDP shows the parameters of the module and not its flat ones."""
    return bool(fsdp_state._use_orig_params)
