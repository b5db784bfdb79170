"""The process group of one rank, whatever its device: what a collective would bring there is there already.

None of torch's backends takes tensors of Metal, not even to move them nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise._torch_compat.groups import FinishedWork, add_backends, backends_of
from shardwise.collectives import carriers
from shardwise.collectives.carriers import GroupMember
from shardwise.job.devices import ALONE_BACKEND, CPU, MPS


def _leave(group: AloneGroup, *arguments: Any, **options: Any) -> dist.Work:
    return FinishedWork(lambda: None)


def _copy(group: AloneGroup, outputs: Any, inputs: Any, *options: Any, **others: Any) -> dist.Work:
    with torch.no_grad():
        for output, source in zip(_flat(outputs), _flat(inputs), strict=True):
            output.copy_(source.view_as(output))
    return FinishedWork(lambda: None)


def _flat(tensors: Tensor | Sequence[Any]) -> list[Tensor]:
    """Return the tensors of any nest of lists: an operation of one rank has one for each that it is given."""
    return [tensors] if isinstance(tensors, Tensor) else [leaf for part in tensors for leaf in _flat(part)]


class AloneGroup(dist.ProcessGroup):
    """The group of one rank: sums and broadcasts leave a tensor as it is, and what has an output is copied there.

    There are no messages: nobody is there to get one.
    """

    def __init__(self, flat: dist.ProcessGroup) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]
        add_backends(self, backends_of(flat))  # torch keeps the group's name with them

    allreduce = allreduce_coalesced = broadcast = reduce = barrier = _leave  # type: ignore[assignment]
    allgather = allgather_coalesced = reduce_scatter = alltoall = gather = scatter = _copy  # type: ignore[assignment]
    all_gather_single = all_gather_single_coalesced = all_to_all_single = _copy  # type: ignore[assignment]
    reduce_scatter_single = reduce_scatter_single_coalesced = _copy  # type: ignore[assignment]

    # The names of torch before 2.13, which it still calls in places.
    _allgather_base = allgather_into_tensor_coalesced = alltoall_base = _copy  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_tensor_coalesced = _copy  # type: ignore[assignment]


def register_alone() -> None:
    """Make `init_process_group("alone")` work, for one rank; a second call does nothing."""
    if ALONE_BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(ALONE_BACKEND, _create, extended_api=True, devices=[CPU, MPS])


def _create(options: Any, backend_options: Any) -> dist.ProcessGroup:
    """The group; called by torch."""
    return AloneGroup(carriers.make(carriers.GLOO, GroupMember.of(options)))
