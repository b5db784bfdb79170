"""The backends that carry a group's bytes, made by name and without torch.distributed: Gloo, NCCL, the native engine.

What is put together from other groups (`hierarchical.py`) makes its parts here, on the members alone and from the store
that torch gives a backend, as torch makes its own.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from shardwise._torch_compat.groups import group_of, nccl_options
from shardwise.collectives import engine, registration
from shardwise.errors import MachineError

GLOO, NCCL = "gloo", "nccl"
NAMES = (GLOO, NCCL, registration.BACKEND)


@dataclass(frozen=True)
class GroupMember:
    """A rank's place in a group that is to be made.

    Attributes:
        store: seen by the members alone, by no other group.
        rank: in the group.
        members: global ranks by rank in the group, for messages.
        timeout: of each operation.
    """

    store: dist.Store
    rank: int
    members: tuple[int, ...]
    timeout: timedelta

    @classmethod
    def of(cls, options: Any) -> GroupMember:
        """From what torch gives the creator of a backend; its list of members is empty for the world."""
        members = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        return cls(options.store, options.group_rank, members, options.timeout)

    @property
    def size(self) -> int:
        return len(self.members)

    def among(self, name: str, ranks: list[int]) -> GroupMember:
        """Return this rank's place in the part `ranks` of this group; `name` must be the part's own."""
        store = dist.PrefixStore(name, self.store)
        return replace(self, store=store, rank=ranks.index(self.rank), members=tuple(self.members[r] for r in ranks))


def carries_host_memory() -> bool:
    """Return whether the group of all ranks takes tensors in host memory; over NCCL alone it does not."""
    parts = dist.get_backend_config().split(",")
    return any(part.startswith("cpu:") for part in parts)


def make(name: str, member: GroupMember) -> dist.ProcessGroup:
    """A process group whose tensors `name` carries; beside NCCL, Gloo carries those of the CPU."""
    backends = {"cpu": _backend(GLOO if name == NCCL else name, member)}
    if name == NCCL:
        backends["cuda"] = _backend(NCCL, replace(member, store=dist.PrefixStore(NCCL, member.store)))
    elif name == registration.BACKEND:
        backends["cuda"] = backends["cpu"]
    return group_of(backends, member.store, member.rank, member.size)


def make_or(name: str, instead: str, member: GroupMember) -> dist.ProcessGroup:
    """`make`; where the engine cannot join these ranks, which all of them see, a group of `instead`, with a line."""
    try:
        return make(name, member)
    except (RuntimeError, MachineError) as error:
        if name != registration.BACKEND or instead == registration.BACKEND:
            raise
        if member.rank == 0:
            warnings.warn(f"{instead} carries the collectives of these {member.size} ranks: {error}", stacklevel=2)
        return make(instead, member.among("instead", list(range(member.size))))


def _backend(name: str, member: GroupMember) -> Any:
    if name == registration.BACKEND:
        return engine.create(member.store, member.rank, member.members, member.timeout)
    if name == NCCL:
        return dist.ProcessGroupNCCL(member.store, member.rank, member.size, nccl_options(member.timeout))
    return dist.ProcessGroupGloo(member.store, member.rank, member.size, timeout=member.timeout)
