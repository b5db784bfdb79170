"""Objects from rank to rank: `send`, `recv_from`, `broadcast`, `allgather` and barriers.

`recv_from` cannot know whether its peer called `send` or `broadcast`, so both are the same exchange: the object one
way, an acknowledgement the other. Objects are pickled by torch's own object collectives, which only ranks of the job's
own process group can reach. A group of one needs no message.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from shardwise.smp.exceptions import MessageError
from shardwise.smp.v1.ranks import CommGroup, RankType, group_ranks, torch_group
from shardwise.smp.v1.session import state
from shardwise.smp.v1.wait_registry import RECEIVE, SEND

HOST = torch.device("cpu")  # messages travel over Gloo, on NCCL ranks too


def send(obj: Any, dest_rank: int, rank_type: RankType = RankType.WORLD_RANK) -> None:
    """Send `obj` to a rank, which has to call `recv_from`; returns when it has.

    Raises:
        MessageError: there is no such rank, it is this one, or it did not answer in time.
    """
    _exchange(obj, [_global(dest_rank, rank_type)])


def broadcast(obj: Any, group: CommGroup = CommGroup.WORLD) -> None:
    """Send `obj` to all others of `group`, each of which has to call `recv_from`; returns when all have.

    Raises:
        MessageError: one of them did not answer in time.
    """
    _exchange(obj, [rank for rank in group_ranks(group) if rank != state.layout.rank])


def recv_from(src_rank: int, rank_type: RankType = RankType.WORLD_RANK) -> Any:
    """Return what a rank sends to this one by `send` or `broadcast`.

    Raises:
        MessageError: there is no such rank, it is this one, or it sent nothing in time.
    """
    source = _global(src_rank, rank_type)
    received: list[Any] = [None]

    def receive(rank: int) -> None:
        dist.recv_object_list(received, rank, device=HOST)
        dist.send(torch.ones(1), rank)

    try:
        state.waits.message(RECEIVE, [source], receive)
    except (RuntimeError, dist.DistError) as error:
        raise MessageError(f"rank {state.layout.rank} waited for a message of rank {source}: {error}") from error
    return received[0]


def allgather(obj: Any, group: CommGroup = CommGroup.WORLD) -> list[Any]:
    """The objects of all ranks of `group`, by rank in it. Collective.

    Raises:
        MessageError: one of them waits for this rank elsewhere, has ended, or did not come in time.
    """
    gathered: list[Any] = [None] * len(group_ranks(group))
    if len(gathered) == 1:
        return [obj]
    state.waits.assemble("smp.allgather", group_ranks(group))
    dist.all_gather_object(gathered, obj, group=torch_group(group))
    return gathered


def barrier(group: CommGroup = CommGroup.WORLD) -> None:
    """Wait for all ranks of `group`.

    Raises:
        MessageError: one of them waits for this rank elsewhere, has ended, or did not come in time.
    """
    if len(group_ranks(group)) > 1:
        state.waits.assemble("smp.barrier", group_ranks(group))


def dp_barrier() -> None:
    """Wait for all ranks of the data group."""
    barrier(CommGroup.DP_GROUP)


def mp_barrier() -> None:
    """Wait for all ranks of the model group."""
    barrier(CommGroup.MP_GROUP)


def _exchange(obj: Any, ranks: list[int]) -> None:
    def send_to(rank: int) -> None:
        dist.send_object_list([obj], rank, device=HOST)

    try:
        state.waits.message(SEND, ranks, send_to)
        for rank in ranks:
            dist.recv(torch.empty(1), rank)
    except (RuntimeError, dist.DistError) as error:
        raise MessageError(
            f"rank {state.layout.rank} sent to ranks {ranks}, and not all called smp.recv_from: {error}"
        ) from error


def _global(rank: int, rank_type: RankType) -> int:
    ranks = group_ranks(rank_type)
    if not 0 <= rank < len(ranks):
        raise MessageError(f"{rank_type.name} {rank} does not exist; there are {len(ranks)}, from 0")
    if ranks[rank] == state.layout.rank:
        raise MessageError(f"{rank_type.name} {rank} is this rank itself; a message needs two")
    return ranks[rank]
