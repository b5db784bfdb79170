"""SMDDP's first API: `smdistributed.dataparallel.torch.distributed` and `….torch.parallel.DistributedDataParallel`.

Scripts from before version 1.4, when SMDDP became a backend of torch.distributed, take collectives and the wrapper from
here. Both are torch's, over the backend `smddp`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import (
    ReduceOp,
    all_gather,
    all_reduce,
    all_to_all_single,
    barrier,
    broadcast,
    get_rank,
    get_world_size,
    group,
    is_available,
    is_initialized,
)

from shardwise.launch.environment import detect
from shardwise.smp.session import device_type
from shardwise.smp.v1 import smddp

__all__ = [
    "DistributedDataParallel",
    "ReduceOp",
    "all_gather",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "group",
    "init_process_group",
    "is_available",
    "is_initialized",
]


def init_process_group(backend: str | None = None, **settings: Any) -> None:
    """Join the other ranks over `smddp`; a second call does nothing.

    These scripts put their model on "cuda" before they choose a device, so this rank's GPU is chosen here.

    Args:
        backend: has no effect: there is one.
        settings: as torch.distributed's, `timeout` for one.
    """
    smddp.register_smddp()
    if device_type() == "cuda":
        torch.cuda.set_device(get_local_rank())
    if not dist.is_initialized():
        dist.init_process_group(smddp.NAME, **settings)


def get_local_rank() -> int:
    """This process among those of its host; 0 where no launcher started it."""
    environment = detect()
    return 0 if environment is None else environment.local_rank


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """torch's, with the arguments in SMDDP's order. The module is on one device, that of its parameters.

    Args:
        module: the model, on this rank's device.
        device_ids: has no effect, as `output_device`: the module's device is taken.
        broadcast_buffers: rank 0's buffers before each forward.
        process_group: the ranks, all of them by default.
        bucket_cap_mb: of gradients that are averaged together.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Any = None,
        output_device: Any = None,
        broadcast_buffers: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float = 25,
        **settings: Any,
    ) -> None:
        super().__init__(
            module,
            broadcast_buffers=broadcast_buffers,
            process_group=process_group,
            bucket_cap_mb=bucket_cap_mb,
            **settings,
        )
