"""Refuses collectives and process groups that a user's forward calls by itself.

Ranks may skip blocks, run other microbatches at the time, or hold another stage, so that such calls would not meet.
Only calls that stand in the user's own code are refused: torch's SyncBatchNorm and what runs here pass.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist

from shardwise.errors import UserCodeError

NAMES = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single",
    "barrier", "batch_isend_irecv", "broadcast", "broadcast_object_list", "gather", "irecv", "isend", "new_group",
    "recv", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "send",
)  # fmt: skip
OF_LIBRARIES = ("torch", "shardwise", "transformers", "accelerate")


@contextmanager
def own_collectives_refused(inside: Collection[int] = ()) -> Iterator[None]:
    """Inside, a collective that is called from a module of the user's raises UserCodeError.

    Args:
        inside: ranks that all run the same modules: collectives among them alone pass.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    with mock.patch.dict(vars(dist), {name: _checked(getattr(dist, name), inside) for name in NAMES}):
        yield


def _checked(collective: Callable[..., Any], inside: Collection[int]) -> Callable[..., Any]:
    @functools.wraps(collective)
    def call(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1)
        is_own = str(caller.f_globals.get("__name__", "")).partition(".")[0] not in OF_LIBRARIES
        if is_own and not _members(collective, *args, **kwargs) <= set(inside):
            raise UserCodeError(
                f"a forward calls torch.distributed.{collective.__name__} ({caller.f_code.co_filename}:"
                f"{caller.f_lineno}), and those of several ranks need not meet. Compute what ranks share in a callback "
                "after the step, or train with one worker"
            )
        return collective(*args, **kwargs)

    return call


def _members(collective: Callable[..., Any], *args: Any, **kwargs: Any) -> set[int]:
    """Return the global ranks of the group in which a collective is called."""
    group = inspect.signature(collective).bind_partial(*args, **kwargs).arguments.get("group")
    return set(dist.get_process_group_ranks(group or dist.group.WORLD))
