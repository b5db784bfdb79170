"""Calls the hooks of a user's parameters on whole gradients, once a step, on every layout alike.

Parameters are made anew when they are sharded and get their storage, so that autograd would not find the hooks. It
would also hand each rank's part of a gradient to them. In one process a hook sees the gradient of all samples.
"""

from __future__ import annotations

import torch

from shardwise._torch_compat import accelerator
from shardwise.errors import UserCodeError
from shardwise.model.gradient_hooks import GradientHook, call_hooks
from shardwise.parallel.tensor_map import ParameterEntry


def apply_gradient_hooks(entry: ParameterEntry, hooks: tuple[GradientHook, ...], seed: int) -> None:
    """Put in place of the gradient what `hooks` make of it. Collective over shard and tensor groups.

    Random numbers that a hook draws are the same on every rank: those of `seed`.

    Raises:
        UserCodeError: a hook raised, or returned another shape.
    """
    gradient = entry.local_gradient
    if gradient is None:
        return
    whole = entry.whole(gradient=True).clone()
    try:
        with torch.no_grad(), accelerator.generators_kept(whole.device):
            torch.manual_seed(seed)
            changed = call_hooks(hooks, whole)
    except Exception as error:
        raise UserCodeError(
            f"a hook on the gradient of {entry.name} raised {type(error).__name__}: {error}; it is given the whole "
            "gradient, a plain tensor, while parameters may be sharded: let it use the gradient alone"
        ) from error
    if changed.shape != whole.shape:
        raise UserCodeError(
            f"a hook on the gradient of {entry.name} returned the shape {tuple(changed.shape)}; return "
            f"{tuple(whole.shape)}"
        )
    for region in entry.regions:
        gradient[region.local].copy_(changed[region.logical])
