"""`smdistributed.dataparallel.torch.torch_smddp`: importing it registers the backend `smddp`.

Amazon's backend speeds up two collectives on its own network. Here the name stands for the best that this machine has:
NCCL for CUDA tensors; for those of the CPU the native engine where it can join the group's ranks, else Gloo.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from shardwise.collectives import carriers, engine, registration
from shardwise.collectives.carriers import GroupMember
from shardwise.smp.options import DEVICE_VARIABLE

NAME = "smddp"


def _create(options: Any, backend_options: Any) -> dist.ProcessGroup:
    """A group; called by torch on each member with the group's own store."""
    member = GroupMember.of(options)
    return carriers.make_or(_carrier(member), carriers.GLOO, member.among(NAME, list(range(member.size))))


def _carrier(member: GroupMember) -> str:
    """Return what carries a group's tensors; its rank 0 says if the engine can, and where not, why."""
    on_cpu = os.environ.get(DEVICE_VARIABLE) == "cpu"  # where torch.cuda says that it is there
    if not on_cpu and torch.cuda.is_available() and dist.is_nccl_available():
        return carriers.NCCL
    if member.size == 1:
        return carriers.GLOO
    if member.rank == 0:
        problem = engine.obstacle()
        member.store.set("carrier", carriers.GLOO if problem else registration.BACKEND)
        if problem and member.members[0] == 0:
            print(f"note: smddp is Gloo here, the native engine is not usable: {problem}.", file=sys.stderr)
    return member.store.get("carrier").decode()


def register_smddp() -> None:
    """Make `init_process_group("smddp")` work; a second call does nothing."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


register_smddp()
