"""Process groups and their stores: operations of a group that torch.distributed need not know of."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# No public name: collectives that a compiler can trace, which users call too (torch 2.11 to 2.14).
from torch.distributed import _functional_collectives, distributed_c10d

# No public name: DTensor keeps how it moved tensors between placements, with the meshes (torch 2.11 to 2.13).
from torch.distributed.tensor import _redistribute as redistribution
from torch.distributed.tensor import debug

functional_collectives = _functional_collectives
UNUSED_TAG = 2**30 - 1  # of messages that nobody sends
# Public names, but torch 2.13 warns of the older ones.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# A group of ours may fall back on another one of torch's; options are passed on as torch gives them.
def all_gather_base(group: dist.ProcessGroup, output: Tensor, part: Tensor, *options: Any) -> Any:
    """Start a group's own all-gather into one tensor; return its work."""
    return group._allgather_base(output, part, *options)


def reduce_scatter_base(group: dist.ProcessGroup, output: Tensor, whole: Tensor, *options: Any) -> Any:
    """Start a group's own reduce-scatter of one tensor; return its work."""
    return group._reduce_scatter_base(output, whole, *options)


def row_engine(group: dist.ProcessGroup, rows: Tensor) -> Any:
    """Return the engine of a group that exchanges `rows` from where they lie; None where others move them."""
    backend = group._get_backend(rows.device) if rows.device.type == "cpu" else None
    return backend if hasattr(backend, "exchange_rows") else None


def flight_record() -> dict[str, Any]:
    """Return what NCCL's flight recorder has of this process; empty where torch has no NCCL."""
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)
    return {} if dump is None else json.loads(dump(includeCollectives=True, onlyActive=False))


def nccl_options(timeout: timedelta) -> Any:
    """Return NCCL's options with a timeout of each operation."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return options


def all_gather_whole(group: dist.ProcessGroup, output: Tensor, piece: Tensor) -> None:
    """`piece` [c] of every rank to `output` [n * c]; returns when it is there (CUDA: for the current stream)."""
    group._allgather_base(output, piece).wait()


def all_gather_coalesced(group: dist.ProcessGroup, outputs: Sequence[Tensor], pieces: Sequence[Tensor]) -> None:
    """Several `all_gather_whole` as one call."""
    group.allgather_into_tensor_coalesced(list(outputs), list(pieces)).wait()


def reduce_scatter_whole(group: dist.ProcessGroup, output: Tensor, whole: Tensor, reduction: Any) -> None:
    """The rank's piece of the reduced `whole` [n * c] to `output` [c]."""
    group._reduce_scatter_base(output, whole, _reduce_scatter_options(reduction)).wait()


def reduce_scatter_coalesced(
    group: dist.ProcessGroup, outputs: Sequence[Tensor], wholes: Sequence[Tensor], reduction: Any
) -> None:
    """Several `reduce_scatter_whole` as one call."""
    group.reduce_scatter_tensor_coalesced(list(outputs), list(wholes), _reduce_scatter_options(reduction)).wait()


def all_to_all(group: dist.ProcessGroup, output: Tensor, whole: Tensor) -> None:
    """Equal pieces of `whole`, one for each rank, to `output`, one from each rank."""
    group.alltoall_base(output, whole, [], []).wait()


def _reduce_scatter_options(reduction: Any) -> dist.ReduceScatterOptions:
    options = dist.ReduceScatterOptions()
    options.reduceOp = reduction
    return options


def group_of(backends: Mapping[str, Any], store: dist.Store, rank: int, size: int) -> dist.ProcessGroup:
    """A process group over backends by device type, which torch.distributed does not know of."""
    group = dist.ProcessGroup(store, rank, size)
    add_backends(group, backends)
    return group


def backends_of(group: dist.ProcessGroup) -> dict[str, Any]:
    """The group's backends by device type."""
    return {device.type: group._get_backend(device) for device in group._device_types}


def add_backends(group: dist.ProcessGroup, backends: Mapping[str, Any]) -> None:
    """Add backends to `group`, by device type, for what it does not do itself."""
    types = {"gloo": dist.ProcessGroup.BackendType.GLOO, "nccl": dist.ProcessGroup.BackendType.NCCL}
    for device, backend in backends.items():
        backend_type = types.get(backend.name(), dist.ProcessGroup.BackendType.CUSTOM)
        group._register_backend(torch.device(device), backend_type, backend)
        group._set_default_backend(backend_type)


def default_store() -> dist.Store:
    """The store in which the ranks of the job have met; waits for a public way to ask for it."""
    store: dist.Store = dist.distributed_c10d._get_default_store()
    return store


def fake_store() -> dist.Store:
    """The store of the backend "fake", whose collectives do nothing: one process plays a rank of any world."""
    # No public name: the backend registers itself when torch's own testing module is imported (torch 2.11 to 2.13).
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


# No public name: what torch.distributed and its functional collectives bring to the dispatcher (torch 2.11 to 2.13).
COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional")


def group_of_operator(args: tuple[Any, ...]) -> dist.ProcessGroup | None:
    """Return the group of a collective's operator, from its arguments; None where it has none."""
    for value in args:
        if isinstance(value, torch.ScriptObject) and str(value._type()).endswith("ProcessGroup"):
            return dist.ProcessGroup.unbox(value)
    names: list[Any] = [value for value in args if isinstance(value, str)]
    return distributed_c10d._resolve_process_group(names[-1]) if names else None


class FinishedWork(dist.Work):
    """The work of a collective that has nothing to do; it tells when it is waited for."""

    def __init__(self, waited: Callable[[], None]) -> None:
        super().__init__()
        self._waited = waited

    def wait(self, timeout: Any = None) -> bool:
        self._waited()
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:  # type: ignore[override]
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result([])
        return future


def is_alive(group: dist.ProcessGroup) -> bool:
    """Return True if `group` was not destroyed."""
    # No public name: torch keeps its groups in a private map (torch 2.11 to 2.13).
    return group in dist.distributed_c10d._world.pg_map


# Operations of a group that torch.distributed need not know. Public names exist for groups that it has made alone.
def clear_placement_cache() -> None:
    """Forget the meshes that DTensor keeps: an equal one would find the dead groups of an earlier process group.

    They also keep those groups alive, each with a thread of Gloo's that wakes up a hundred times a second.
    """
    # No public name, and it may be absent from torch 2.11.
    getattr(debug, "_clear_sharding_prop_cache", lambda: None)()
    redistribution.clear_redistribute_planner_cache()
    redistribution._gen_transform_infos.cache_clear()


@cache
def let_timeouts_be_set(backend: str) -> None:
    """Let torch's `_set_pg_timeout` set the timeout of groups on `backend` too: it asks for Gloo or NCCL by type."""
    for_others = distributed_c10d._set_pg_timeout

    @functools.wraps(for_others)
    def set_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
        whole = group or dist.group.WORLD
        if not isinstance(whole, dist.ProcessGroup) or backend not in dist.get_backend_config(whole):
            return for_others(timeout, group)
        for device in whole._device_types:
            whole._get_backend(device).set_timeout(timeout)

    distributed_c10d._set_pg_timeout = set_timeout


@cache
def let_barriers_be_monitored(backend: str) -> None:
    """Let torch's `monitored_barrier` run on groups of `backend` too: it asks for Gloo by name."""
    for_gloo = distributed_c10d.monitored_barrier

    @functools.wraps(for_gloo)
    def monitored_barrier(
        group: dist.ProcessGroup | None = None,
        timeout: timedelta | float | None = None,
        wait_all_ranks: bool = False,
    ) -> None:
        whole = group or dist.group.WORLD
        if not isinstance(whole, dist.ProcessGroup) or dist.get_backend(whole) != backend:
            return for_gloo(group, timeout, wait_all_ranks)
        if timeout is None:
            timeout = distributed_c10d._get_default_timeout(dist.Backend(backend))
        elif isinstance(timeout, float):
            timeout = timedelta(seconds=timeout)
        whole.monitored_barrier(timeout, wait_all_ranks)  # type: ignore[attr-defined]

    distributed_c10d.monitored_barrier = dist.monitored_barrier = monitored_barrier


def close_gloo(timeout: timedelta) -> None:
    """Close the connections of this process's Gloo groups: ranks that wait for it in one see their collective fail.

    Gloo cannot be aborted. It closes a group's connections where a message is waited for in vain.
    """
    for group in list(distributed_c10d._world.pg_map):
        if group.size() > 1 and "gloo" in str(distributed_c10d._world.pg_map[group][0]).lower():
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1)], (group.rank() + 1) % group.size(), UNUSED_TAG).wait(timeout)
