"""The session of one process of a script: whether it has joined the other ranks, and on which device it computes.

SMP's API is one of a process: `smp.rank()`, `smp.state.cfg`. Each version has one session (`v1/session.py`,
`v2/session.py`), which the module-level functions of its API look up. What stands below them is handed it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from typing import TypeVar

import torch
import torch.distributed as dist

from shardwise.kernels.sums import fp32_sums
from shardwise.launch.environment import detect
from shardwise.launch.process_group import gpus_of_host, process_group
from shardwise.plan.plan import World
from shardwise.smp.exceptions import NotInitializedError
from shardwise.smp.options import DEVICE_VARIABLE
from shardwise.training.setup import current_world

Value = TypeVar("Value")


class SmpSession:
    """Membership of one process in the job, as both versions of the API have it.

    Attributes:
        api: name of the API in messages, `smp` or `tsm`.
        initialized: `init` was called, and `reset` was not called since.
    """

    api = "smp"

    def __init__(self) -> None:
        self.initialized = False
        self._device: torch.device | None = None
        self._exit = ExitStack()

    @property
    def device(self) -> torch.device:
        """The device on which this rank computes. Raises NotInitializedError before `init`."""
        return self.after_init(self._device)

    def after_init(self, value: Value | None) -> Value:
        """Return `value`, which `init` has set. Raises NotInitializedError where it is None."""
        if value is None:
            raise NotInitializedError(f"{self.api} is used before {self.api}.init(); call {self.api}.init() first")
        return value

    def join(self, device_type: str, backend: str) -> World:
        """Join the other ranks over `backend` until `reset`; return the world that they make."""
        self._device = self._exit.enter_context(process_group(device_type, backend))
        self.until_reset(fp32_sums(device_type))
        return current_world(self._device)

    def until_reset(self, context: AbstractContextManager[object]) -> None:
        """Enter `context`, and leave it at `reset`."""
        self._exit.enter_context(context)

    def reset(self) -> None:
        """Forget everything and leave the other ranks."""
        self._exit.close()
        self.__init__()  # type: ignore[misc]


def device_type() -> str:
    """Return what `shardwise run --device` says, else `cuda` where there is any."""
    return os.environ.get(DEVICE_VARIABLE) or ("cuda" if torch.cuda.is_available() else "cpu")


def launched_world(device_type: str) -> World:
    """Return the world that the launcher describes, before its ranks have met."""
    environment = detect()
    if environment is None:
        return World(1, device_type, 1)
    hosts = -(-environment.world_size // environment.local_world_size)
    gpus = gpus_of_host(device_type, environment)
    return World(environment.world_size, device_type, environment.local_world_size, hosts=hosts, gpus=gpus)


def print_notes(notes: Iterable[str]) -> None:
    """Print `notes` on rank 0's standard error, a line each."""
    if dist.get_rank() == 0:
        for note in notes:
            print(f"note: {note}", file=sys.stderr)
