"""Refuses collectives and process groups that a user's forward calls by itself.

Ranks may skip blocks, run other microbatches at the time, or hold another stage, so that such calls would not meet.
Only calls that stand in the user's own code are refused: torch's SyncBatchNorm and what runs here pass.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import torch.distributed as dist
import torch.distributed.nn as differentiable
from torch import nn

from shardwise._torch_compat.groups import functional_collectives
from shardwise.errors import UserCodeError
from shardwise.model.user_state import user_namespaces

NAMES = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single",
    "barrier", "batch_isend_irecv", "broadcast", "broadcast_object_list", "gather", "irecv", "isend", "new_group",
    "recv", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "send",
)  # fmt: skip
FUNCTIONAL = ("all_gather_tensor", "reduce_scatter_tensor", "all_reduce", "all_to_all_single", "broadcast")
OF_LIBRARIES = ("torch", "shardwise", "transformers", "accelerate")


@contextmanager
def own_collectives_refused(inside: Collection[int] = (), files: Iterable[ModuleType] = ()) -> Iterator[None]:
    """Inside, a collective that is called from a module of the user's raises UserCodeError.

    Args:
        inside: ranks that all run the same modules: collectives among them alone pass.
        files: the user's Python modules, which may have imported collectives by name.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    with ExitStack() as stack:
        for file, names in _callable_from(files):
            for name in names:
                stack.enter_context(mock.patch.object(file, name, _checked(vars(file)[name], inside)))
        yield


def defining_files(modules: Iterable[nn.Module]) -> list[ModuleType]:
    """Return the Python modules in which classes of the user's modules are defined."""
    return [namespace for namespace in user_namespaces(modules) if isinstance(namespace, ModuleType)]


def _callable_from(files: Iterable[ModuleType]) -> Iterator[tuple[ModuleType, list[str]]]:
    """Yield the Python modules in which user code finds collectives, with the names that these have there."""
    known = {getattr(dist, name) for name in NAMES}
    yield dist, [*NAMES]
    yield functional_collectives, [*FUNCTIONAL]
    for file in (differentiable, differentiable.functional):
        yield file, [name for name in NAMES if name in vars(file)]
    for file in files:
        names = [name for name, value in vars(file).items() if inspect.isfunction(value) and value in known]
        yield file, names


def _checked(collective: Callable[..., Any], inside: Collection[int]) -> Callable[..., Any]:
    @functools.wraps(collective)
    def call(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1)
        is_own = str(caller.f_globals.get("__name__", "")).partition(".")[0] not in OF_LIBRARIES
        if is_own and not _members(collective, *args, **kwargs) <= set(inside):
            raise UserCodeError(
                f"a forward calls torch.distributed.{collective.__name__} "
                f"({caller.f_code.co_filename}:{caller.f_lineno}), and those of several ranks need not meet. Compute "
                "what ranks share in a callback after the step, or train with one worker"
            )
        return collective(*args, **kwargs)

    return call


def _members(collective: Callable[..., Any], *args: Any, **kwargs: Any) -> set[int]:
    """Return the global ranks of the group in which a collective is called; all where it has no such group."""
    group = inspect.signature(collective).bind_partial(*args, **kwargs).arguments.get("group")
    is_group = isinstance(group, dist.ProcessGroup)
    return set(dist.get_process_group_ranks(group if is_group else dist.group.WORLD))
