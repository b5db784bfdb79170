"""The backend `shardwise` of torch.distributed, as torch knows it.

torch calls `register` at the end of `import torch`, by the entry point `torch.backends` of this package, so
`init_process_group("shardwise")` works in any program. So nothing here is imported that torch has not: the engine is
loaded, and built if need be, when the first group is made. torch itself is imported by the functions alone: a program
that imports this module first would else have torch ask for `register` before there is one.
"""

from __future__ import annotations

import atexit
import os
import sys
from typing import Any

BACKEND = "shardwise"
PATIENCE_AT_EXIT = 5.0  # seconds for what is under way when the interpreter ends
ACCELERATOR_FILES = ("/dev/nvidiactl", "/dev/nvmap", "/dev/dxg", "/dev/kfd")  # NVIDIA, its Tegra, WSL, AMD


def register() -> None:
    """Make `shardwise` a backend of torch.distributed; a second call does nothing.

    It moves tensors of the CPU; those of CUDA go through the host's memory (`native/staging.h`).
    """
    import torch.distributed as dist  # calls this function too, where it is imported for the first time

    if not dist.is_available() or hasattr(dist.Backend, BACKEND.upper()):
        return
    dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=_devices())
    atexit.register(_leave_groups)  # early: what a program does at its own exit still has its groups


def _devices() -> list[str]:
    """The devices whose tensors can be moved; CUDA's only where there may be one, since torch prefers it then."""
    import torch

    may_have_cuda = torch.backends.cuda.is_built() and any(map(os.path.exists, ACCELERATOR_FILES))
    return ["cpu", "cuda"] if may_have_cuda else ["cpu"]


def _create(options: Any, backend_options: Any) -> Any:
    """A group's backend; called by torch on each member with the group's own store."""
    from shardwise._torch_compat.groups import let_barriers_be_monitored, let_timeouts_be_set
    from shardwise.collectives import engine

    let_timeouts_be_set(BACKEND)
    let_barriers_be_monitored(BACKEND)
    names = list(options.global_ranks_in_group) or list(range(options.group_size))
    return engine.create(options.store, options.group_rank, names, options.timeout)


def _leave_groups() -> None:
    engine = sys.modules.get("shardwise.collectives.engine")
    if engine is not None:
        engine.leave_groups(PATIENCE_AT_EXIT)
