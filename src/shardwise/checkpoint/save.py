"""Saving: when it may begin, on which thread it runs, and what becomes of a failure.

`Checkpointer.save` starts a second thread, which plans with the other ranks through DCP, copies the state block by
block, writes, and commits. The optimizer's next step first has the rest of the state copied (`settle`). One save at a
time: the next waits for the last. A failure is kept until the training thread asks, at a step boundary, where the ranks
agree on it.
"""

from __future__ import annotations

import threading
import uuid
import warnings
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from shardwise._torch_compat import accelerator
from shardwise.checkpoint.catalog import Retention, checkpoint_name, checkpoints
from shardwise.checkpoint.description import RunDescription
from shardwise.checkpoint.manifest import BLOCK_BYTES, Progress
from shardwise.checkpoint.staging import Source, Staging, Straight
from shardwise.checkpoint.state import Optimizer, snapshot
from shardwise.checkpoint.storage_write import (
    ChunkSavePlanner,
    Describe,
    SafetensorsWriter,
    in_file_order,
    safetensors_header,
)
from shardwise.checkpoint.stores import Store
from shardwise.collectives.carriers import carries_host_memory
from shardwise.errors import CheckpointError, ShardwiseError
from shardwise.job.devices import copies_aside
from shardwise.kernels.precision import LossScaler
from shardwise.parallel.model import ParallelModel

SYNCHRONOUS_BYTES = 1 << 24  # of staging from a GPU, where training waits anyway
PATIENCE = timedelta(days=1)  # ranks write at different speeds; one that dies closes its connection at once


class Checkpointer:
    """Saves one run's state. Every method but `failed` and `settle` is collective.

    Args:
        data: what the manifest says of the data.
        is_new: whether the run does not go on from the store; then there may be no checkpoints in it.
    """

    def __init__(
        self, model: ParallelModel, optimizer: Optimizer, store: Store, data: dict[str, Any], is_new: bool = False
    ) -> None:
        self.model, self.optimizer, self.store = model, optimizer, store
        self.description = RunDescription(model, data)
        self.settings = model.plan.job.checkpoint
        self.group = dist.new_group(backend="gloo", timeout=PATIENCE)  # the writing thread's own: nothing may overtake
        self.retention = Retention(self.settings, model.plan.job.evaluation)
        self.failure: BaseException | None = None
        self.saved: str | None = None
        self._staging: Staging | None = None
        self._thread: threading.Thread | None = None
        self._run = claim(store, is_new)
        # Members of a combined optimizer may be stepped by themselves, in another thread.
        optimizers = [optimizer.inner, *getattr(optimizer.inner, "members", ())]
        self._hooks = [member.register_step_pre_hook(lambda *_: self.settle()) for member in optimizers]

    @property
    def failed(self) -> bool:
        """Return whether the last save has failed on this rank; `wait` raises it."""
        return self.failure is not None

    def save(self, progress: Progress, scaler: LossScaler, wait: bool = False) -> None:
        """Write the state after `progress.step` steps; returns when training may go on.

        Raises:
            CheckpointError: this save where it is waited for, or the last one, failed on some rank.
        """
        self.wait()
        name = checkpoint_name(progress.step)
        taken = snapshot(self.model, self.optimizer)
        chunks = in_file_order(taken.chunks)
        lead = torch.frombuffer(bytearray(safetensors_header(chunks)), dtype=torch.uint8)
        parts = [lead, *(chunk.tensor for chunk in chunks)]
        planner = ChunkSavePlanner(f"rank-{dist.get_rank():05d}.safetensors", chunks, taken.scalars, lead.numel())
        describe = self.description.describer(progress, scaler)
        if not self.settings.asynchronous and self.model.device.type == "cpu":
            self._write(name, planner, Straight(parts), describe)
        else:
            self._write_beside(name, planner, parts, describe)
        if wait or not self.settings.asynchronous:
            self.wait()

    def wait(self) -> None:
        """Wait for the save that is under way.

        Raises:
            CheckpointError: it failed; named is the first rank whose own error it was.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self.failure = self.failure, None
        if isinstance(failure, CheckpointException):
            raise named(failure, self.store.root) from failure
        if failure is not None:
            raise failure  # it is not about files: a rank was lost, which the launcher explains

    def settle(self) -> None:
        """Hold what is being saved, so that it may change. The optimizer's step calls it."""
        if self._thread is not None and self._staging is not None:
            self._staging.settle()

    def close(self) -> None:
        """Wait for what is under way, whatever comes of it; used where another error is on its way."""
        for hook in self._hooks:
            hook.remove()
        if self._thread is not None:
            self._thread.join(timeout=60)

    def _write_beside(
        self, name: str, planner: ChunkSavePlanner, parts: Sequence[torch.Tensor], describe: Describe
    ) -> None:
        """Start the writing thread on the state as it is now."""
        staging = self._ring(sum(chunk.bytes for chunk in planner.chunks))
        staging.begin(parts)
        self._thread = threading.Thread(
            target=self._write, args=(name, planner, staging, describe), name=f"shardwise-{name}", daemon=True
        )
        self._thread.start()  # it makes room in the ring, which may be smaller than the state
        if accelerator.is_accelerator(self.model.device):
            staging.settle()  # from the stream that computed it; another one's copies would need an order of their own

    def _write(self, name: str, planner: ChunkSavePlanner, staging: Source, describe: Describe) -> None:
        """Plan, write and commit; the writing thread's work."""
        rank = dist.get_rank()
        writer = SafetensorsWriter(self.store, name, planner, staging, describe, self._fence)
        try:
            dcp.save({}, storage_writer=writer, planner=planner, process_group=self.group)
            self.saved = name
            if rank == 0:
                self._prune(name)
        except BaseException as error:  # DCP's CheckpointException is no Exception
            if rank == 0:
                with suppress(Exception):
                    self._fence()
                    self.store.abandon(name)
            self.failure = error
            staging.cancel()

    def _fence(self) -> None:
        """Refuse to touch a store that another run has claimed since."""
        if self.store.owner() != self._run:
            raise CheckpointError(f"another run writes into {self.store.root} now; give each its own directory")

    def _prune(self, newest: str) -> None:
        """Remove what need not stay. That it cannot be removed is no reason to end a run."""
        try:
            for old in self.retention.surplus(self.store, newest):
                self.store.remove(old)
        except Exception as error:
            warnings.warn(f"an old checkpoint in {self.store.root} could not be removed: {error}", stacklevel=1)

    def _ring(self, size: int) -> Staging:
        """The staging ring, made at the first save; an unlimited one grows with the state."""
        wanted = self.settings.staging_bytes or size + 2 * BLOCK_BYTES
        if not self.settings.asynchronous:
            wanted = SYNCHRONOUS_BYTES
        if self._staging is None:
            self._staging = Staging(wanted, pinned=copies_aside(self.model.device.type))
        self._staging.allow(wanted)
        return self._staging


def named(failure: BaseException, where: str) -> ShardwiseError:
    """The user's error in what DCP raised: that of the lowest rank that has one of its own."""
    if isinstance(failure, CheckpointException):
        rank, (own, _) = min(failure.failures.items())
        cause = named(own, where)
        return type(cause)(f"rank {rank}: {cause}")
    if isinstance(failure, ShardwiseError):
        return failure
    reason = f"{type(failure).__name__}: {failure}"
    if isinstance(failure, OSError) and failure.strerror:
        file = f"{failure.filename}: " if failure.filename else ""
        reason = file + failure.strerror
    return CheckpointError(f"a checkpoint in {where} could not be written or read: {reason}; earlier ones are intact")


def claim(store: Store, is_new: bool = False) -> str:
    """Make the store this run's, and see that every rank sees it. Collective; returns the run's name in it.

    Raises:
        CheckpointError: the directory cannot be written, or some rank's host has another one under this path, or a run
            that `is_new` finds another one's checkpoints.
    """
    said: list[str] = [uuid.uuid4().hex, ""]
    if dist.get_rank() == 0:
        try:
            if is_new and (names := checkpoints(store)):
                raise CheckpointError(
                    f"it holds checkpoints of an earlier run, the newest {names[0]}; call restore() with "
                    "checkpoint.resume=auto to go on from it, or give another directory"
                )
            store.claim(said[0])
        except CheckpointError as error:
            said[1] = str(error)
        except Exception as error:  # an object store has errors of its own
            said[1] = f"{type(error).__name__}: {error}"
    dist.broadcast_object_list(said)
    run, problem = said
    if problem:
        raise CheckpointError(f"checkpoint.directory={store.root!r} cannot be written: {problem}")
    device = accelerator.HOST if carries_host_memory() else accelerator.available()
    unseen = torch.tensor(int(not _sees(store, run)), device=device)
    dist.all_reduce(unseen)
    if int(unseen):
        raise CheckpointError(
            f"checkpoint.directory={store.root!r} is not shared: {int(unseen)} ranks do not see what rank 0 writes "
            "there; use a directory that all hosts share, or a URL such as s3://bucket/run"
        )
    return run


def _sees(store: Store, run: str) -> bool:
    """Return whether this rank's host has the store that `run` owns; an error must not keep it from answering."""
    try:
        return store.owner() == run
    except OSError:
        return False
