"""The checkpoints of one run: what it starts from, and saving its state. How they are written is in checkpoint/."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from shardwise.checkpoint.catalog import checkpoint_name, complete
from shardwise.checkpoint.host_memory import MemoryPlace, StateKeeper
from shardwise.checkpoint.load import restore
from shardwise.checkpoint.manifest import Progress
from shardwise.checkpoint.replica_memory import completed_memory
from shardwise.checkpoint.save import Checkpointer
from shardwise.checkpoint.stores import checkpoint_store
from shardwise.collectives.names import CollectiveName
from shardwise.errors import CheckpointError, ConfigError
from shardwise.job.schema import Job
from shardwise.training.setup import AssembledJob

ENDED = CollectiveName("the end of a step", "world", "barrier")
# The last is a launch's: of its starts nobody says which is the first.
RESTART_COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT", "SHARDWISE_RESTART_COUNT")


def after_restart(job: Job) -> Job:
    """Return the job as restarted ranks run it: from the newest checkpoint, where there is one.

    An elastic agent counts its restarts, and Slurm those of a job that was requeued.
    """
    again = any(int(os.environ.get(count) or 0) > 0 for count in RESTART_COUNTS)
    return going_on(job) if again else job


def going_on(job: Job) -> Job:
    """Return the job as it goes on from its newest checkpoint, where there is one."""
    named = job.checkpoint.resume != "none"  # a run that started from a named checkpoint does so until it has its own
    if named and next(complete(checkpoint_store(job)), None) is None:
        return job
    return job.model_copy(update={"checkpoint": job.checkpoint.model_copy(update={"resume": "auto"})})


def refuse_memory(job: Job) -> None:
    """Refuse to keep state in memory that nobody would go on from.

    Raises:
        ConfigError: the job asks for it.
    """
    if job.checkpoint.memory_every:
        raise ConfigError(
            f"checkpoint.memory_every={job.checkpoint.memory_every}: the memory of hosts is gone on from by launchers "
            "whose hosts come and go (`shardwise train` with PET_NNODES=1:3, on each host); leave it out, or use "
            "checkpoint.every"
        )


def resume_hint(job: Job) -> str | None:
    """Return what a run that failed can go on from, and how; None where nothing is complete."""
    with contextlib.suppress(CheckpointError):
        for name, _ in complete(checkpoint_store(job)):
            return f"the newest complete checkpoint is {name}; --checkpoint.resume auto goes on from it"
    return None


@dataclass(frozen=True)
class HostMemoryState:
    """The memory of one host that keeps the state of a run, as its ranks use it.

    Attributes:
        places: of each rank of the host.
        step: whose state in them the run goes on from; -1: from a checkpoint.
    """

    places: tuple[tuple[MemoryPlace, ...], ...]
    step: int


class RunCheckpoints:
    """The checkpoints of one run, as its session uses them.

    Attributes:
        memory: that keeps the state beside them, where a launcher has given some.
    """

    def __init__(self, assembled: AssembledJob) -> None:
        self.assembled, self.settings = assembled, assembled.plan.job.checkpoint
        self.store = checkpoint_store(assembled.plan.job)
        self.checkpointer: Checkpointer | None = None
        self.memory: HostMemoryState | None = None
        self._keeper: StateKeeper | None = None
        self._has_looked = False  # for a checkpoint to go on from

    @property
    def _has_memory(self) -> bool:
        """True where the run goes on from the memory of hosts."""
        return self.memory is not None and self.memory.step >= 0

    @property
    def failed(self) -> bool:
        """True where this rank knows that the last save failed."""
        return self.checkpointer is not None and self.checkpointer.failed

    def restore(self) -> tuple[Progress, list[str]]:
        """Bring the run to where the checkpoint it resumes from had come; also what there is to say about it.

        The store is claimed once that has succeeded: a run that cannot begin takes it from no other.
        """
        assembled, memory, notes = self.assembled, None, list[str]()
        self._has_looked = True
        if self._has_memory:
            assert self.memory is not None
            memory, notes = completed_memory(self.memory.places, self.memory.step, assembled.model.device)
        restored = restore(
            assembled.model, assembled.optimizer, assembled.scaler, self.store, data_facts(assembled), notes.append,
            memory,
        )  # fmt: skip
        self.checkpointer = self._make() if self.settings.every else None
        if restored is None:
            if self.settings.resume == "auto":
                notes.append(f"no checkpoint in {self.store.root}: training starts at the beginning")
            return Progress(), notes
        progress = restored.progress
        notes.append(f"resumed from {restored.path}: step {progress.step}, {progress.samples} samples")
        return progress.model_copy(update={"validation_loss": None}), notes

    def save(self, progress: Progress, wait: bool) -> str:
        """Save the state after `progress.step` steps and return its path, complete where it is waited for. Collective.

        Raises:
            CheckpointError: this save where it is waited for, or the last one, failed on some rank.
        """
        self.checkpointer = self.checkpointer or self._make()
        self.checkpointer.save(progress, self.assembled.scaler, wait=wait)
        return f"{self.store.root}/{checkpoint_name(progress.step)}"

    def keep(self, progress: Progress) -> None:
        """Keep the state after `progress.step` steps in the hosts' memory, once all ranks have ended them. Collective.

        Raises:
            CheckpointError: there is no room for it.
        """
        with ENDED:  # a run that goes on from here has rank 0's record of the step
            dist.barrier()
        if self._keeper is None:
            assert self.memory is not None
            assembled, places = self.assembled, self.memory.places[int(os.environ["LOCAL_RANK"])]
            facts = data_facts(assembled)
            self._keeper = StateKeeper(assembled.model, assembled.optimizer, facts, places, progress.step - 1)
        self._keeper.keep(progress, self.assembled.scaler)

    def settle(self) -> None:
        """Hold what is being saved, so that it may change."""
        if self.checkpointer is not None:
            self.checkpointer.settle()

    def wait(self) -> None:
        """Wait for a save that is under way.

        Raises:
            CheckpointError: it failed.
        """
        if self.checkpointer is not None:
            self.checkpointer.wait()

    def close(self) -> None:
        """Let a save that is under way come to its end."""
        if self.checkpointer is not None:
            self.checkpointer.close()

    def _make(self) -> Checkpointer:
        """Claim the store. Whoever did not go on from what is there may not write among it."""
        assembled = self.assembled
        goes_on = self._has_looked and (self.settings.resume == "auto" or self._has_memory)
        return Checkpointer(assembled.model, assembled.optimizer, self.store, data_facts(assembled), not goes_on)


def data_facts(assembled: AssembledJob) -> dict[str, Any]:
    """Return what a checkpoint says of its data; `content`, `order` and `split` must be equal to go on from it."""
    data = assembled.given_data
    if data is None:
        return {"corpus": "batches of the caller's own", "content": "", "tokenizer": None, "split": None, "order": ""}
    facts = data.describe()
    if data.streams and not data.sources:
        [stream] = data.streams.values()
        rows = stream.definition.buffer_rows
        order = f"seed {assembled.plan.job.training.seed}, a stream shuffled by {rows} rows"
        return {key: facts.get(key) for key in ("corpus", "content", "tokenizer", "split", "shards")} | {"order": order}
    order = f"seed {assembled.plan.job.training.seed}, {len(data.train)} sequences"
    kept = {key: facts.get(key) for key in ("corpus", "content", "tokenizer", "split")} | {"order": order}
    if not data.sources:
        return kept
    order = f"seed {assembled.plan.job.training.seed}, sources"
    return kept | {"content": "of sources", "order": order, "sources": facts["sources"]}
