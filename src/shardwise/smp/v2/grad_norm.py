"""`clip_grad_norm_` of a model under FSDP: one norm over shards and parts, each element counted once."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from shardwise.errors import ConfigError
from shardwise.smp.v2.session import state
from shardwise.smp.v2.split_model import local_names

# What FSDP, checkpointing and offload put into names.
WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """Scale all gradients of `model` so that their L2 norm is at most `max_norm`; the norm they had. Collective.

    Raises:
        ConfigError: `max_norm` is not positive.
    """
    if not max_norm > 0:
        raise ConfigError(f"clip_grad_norm_: max_norm={max_norm!r} must be positive")
    squares = _squares(model)
    norm = squares.sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(factor.to(parameter.grad.dtype))
    return norm


def plain_name(name: str) -> str:
    """Return a parameter's name in the model that was wrapped."""
    for word in WRAPPERS:
        name = name.replace(word, "")
    return name


def _squares(model: nn.Module) -> Tensor:
    """Return the squared norm over all ranks' parts, in fp32 or wider; those of one sharding are summed together."""
    cuts = local_names(model)
    owner = _shard_groups(model)
    groups_of_parts = state.groups_of_parts()
    kinds = (None, *groups_of_parts)  # whole parameters, and parts by the axis that they are of
    total = torch.zeros(len(kinds), dtype=torch.float64, device=state.device)
    by_group: dict[Any, Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        cut = cuts.get(plain_name(name))
        square = parameter.grad.double().square().sum() / (cut.copies if cut else 1)
        sums = by_group.setdefault(owner.get(id(parameter)), torch.zeros_like(total))
        sums[kinds.index(cut.axis if cut else None)] += square.to(state.device)
    groups = dict.fromkeys([*(group for group in owner.values() if group is not None)])
    for group in groups:  # also where this rank's shards are empty
        sums = by_group.setdefault(group, torch.zeros_like(total))
        dist.all_reduce(sums, group=group)
    for sums in by_group.values():
        total += sums
    if cuts:
        for sums, group in zip(total[1:], groups_of_parts.values(), strict=True):
            dist.all_reduce(sums, group=group)
    return total.sum().float()


def _shard_groups(model: nn.Module) -> dict[int, Any]:
    """Return id of each parameter -> the ranks over which FSDP has sharded it; None where it is whole."""
    groups: dict[int, Any] = {}
    modules: list[Any] = FullyShardedDataParallel.fsdp_modules(model)
    for module in modules:
        whole = module.sharding_strategy == ShardingStrategy.NO_SHARD or module.process_group.size() == 1
        for parameter in module.parameters():  # parents come first, so the innermost has the last word
            groups[id(parameter)] = None if whole else module.process_group
    return groups
