"""A callback that plants hangs in a run of four ranks, one after the other; each ends by itself after some seconds."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import shardwise
from shardwise.checkpoint import storage_write

SECONDS = 5.0
LONG = 9.0  # where there is no median yet
SAVES, EVALUATES = 30, 36  # steps after which that is done


def is_stopped() -> None:
    """Stop this process; another one lets it go on."""
    subprocess.Popen(["/bin/sh", "-c", f"sleep {SECONDS}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def waits_for_a_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire(timeout=SECONDS)


def computes_for_ever() -> None:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        pass


def holds_the_interpreter() -> None:
    """Compute in C without letting other threads of Python run."""
    began = time.perf_counter()
    sum(range(10**6))
    sum(range(int(SECONDS / (time.perf_counter() - began) * 10**6)))


def sleeps() -> None:
    time.sleep(SECONDS)


def slows_the_network() -> None:
    """Let this rank's next collective take as long as a slow link would: inside of it, with all ranks there."""
    real = dist.all_reduce

    def slow_link(*arguments: Any, **settings: Any) -> Any:
        dist.all_reduce = real
        time.sleep(SECONDS)
        return real(*arguments, **settings)

    dist.all_reduce = slow_link


IN_CALLBACK: dict[int, tuple[int, Callable[[], None]]] = {  # steps done -> rank and what it does
    6: (2, is_stopped),
    9: (1, waits_for_a_lock),
    12: (3, computes_for_ever),
    15: (2, holds_the_interpreter),
    39: (2, slows_the_network),
}


class Planted(shardwise.Callback):
    """Plants by the number of steps done."""

    def on_start(self, session: Any) -> None:
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=SECONDS))
        self.session, self.slept = session, set[str]()
        self.plant_in_data(session)
        self.plant_in_model(session)
        self.plant_in_save(session)

    def plant_in_data(self, session: Any) -> None:
        """Let rank 3 wait for its data before step 19."""
        state = session._data_state
        real = state.next_step

        def dead_loader() -> Any:
            if session.rank == 3 and session.steps_done == 18:
                time.sleep(SECONDS)
            return real()

        state.next_step = dead_loader

    def plant_in_model(self, session: Any) -> None:
        """Let rank 2 hang in forward of step 22, 1 in backward of 24, 3 in the optimizer of 26, 0 in evaluation."""
        block = session.model.module.transformer.h[1]

        def in_forward(module: Any, args: Any, output: torch.Tensor) -> None:
            if session.rank == 2 and session.steps_done == 21 and module.training:
                self.once("forward", SECONDS)
            if session.rank == 0 and session.steps_done == EVALUATES and not module.training:
                self.once("evaluation", LONG)
            if session.rank == 1 and session.steps_done == 23 and module.training:
                hidden = output[0] if isinstance(output, tuple) else output
                hidden.register_hook(in_backward)

        def in_backward(gradient: torch.Tensor) -> None:
            self.once("backward", SECONDS)

        def in_optimizer(*_: Any) -> None:
            if session.rank == 3 and session.steps_done == 25:
                self.once("optimizer", SECONDS)

        block.register_forward_hook(in_forward)
        session.optimizer.inner.register_step_pre_hook(in_optimizer)

    def plant_in_save(self, session: Any) -> None:
        """Let rank 1 wait for its disk in the save after step 30."""
        real = storage_write.SafetensorsWriter.write_data

        def slow_disk(*arguments: Any, **settings: Any) -> Any:
            if session.rank == 1 and session.steps_done == SAVES:
                time.sleep(LONG)
            return real(*arguments, **settings)

        storage_write.SafetensorsWriter.write_data = slow_disk  # type: ignore[method-assign]

    def once(self, where: str, seconds: float) -> None:
        if where not in self.slept:
            self.slept.add(where)
            time.sleep(seconds)

    def on_step_begin(self, session: Any) -> None:
        rank, plant = IN_CALLBACK.get(session.steps_done, (-1, sleeps))
        if session.rank == rank:
            plant()
        if session.steps_done == 27 and session.rank == 1:
            self.meet_nobody()

    def meet_nobody(self) -> None:
        """Wait in a collective that the other ranks do not call."""
        with suppress(RuntimeError):
            dist.barrier(self.group)
