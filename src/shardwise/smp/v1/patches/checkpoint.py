"""`smp.patches.checkpoint`: activation checkpointing of modules, called where they are used."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from shardwise.parallel.builder import group_blocks
from shardwise.smp.v1.requests import check_strategy


def checkpoint(module: nn.Module, *args: Any, preserve_rng_state: bool = True, **kwargs: Any) -> Any:
    """`module(*args, **kwargs)`, whose activations are computed again in backward."""
    return torch_checkpoint(module, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state, **kwargs)


def checkpoint_sequential(
    sequential: nn.Sequential,
    input: Any,
    strategy: str = "each",
    preserve_rng_state: bool = True,
    pack_args_as_tuple: bool = False,
) -> Any:
    """`sequential(input)`, its children checkpointed one by one, together (`contiguous`) or N at a time (`group_N`).

    Args:
        sequential: a chain of modules.
        input: of the first; a tuple is its arguments, unless `pack_args_as_tuple`.
        strategy: how many children share a checkpoint.
        preserve_rng_state: draw the same random numbers again.
        pack_args_as_tuple: a tuple is one argument.

    Raises:
        SMPValidationError: there is no such strategy.
    """
    check_strategy(strategy)
    for group in group_blocks(list(sequential), strategy):
        chain = group[0] if len(group) == 1 else nn.Sequential(*group)
        args = input if isinstance(input, tuple) and not pack_args_as_tuple else (input,)
        input = checkpoint(chain, *args, preserve_rng_state=preserve_rng_state)
    return input
