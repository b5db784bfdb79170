"""Keeper: when a run's state is saved, and what it starts from. How is in checkpoint/."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch.distributed as dist

from shardwise.checkpoint.catalog import complete
from shardwise.checkpoint.load import restore
from shardwise.checkpoint.manifest import Progress
from shardwise.checkpoint.save import Checkpointer
from shardwise.checkpoint.stores import checkpoint_store
from shardwise.errors import CheckpointError
from shardwise.job.schema import Job
from shardwise.training.setup import Run
from shardwise.training.step import StepResult


def after_restart(job: Job) -> Job:
    """The job as an elastic agent's restarted ranks run it: from the newest checkpoint, where there is one."""
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    named = job.checkpoint.resume != "none"  # a run that started from a named checkpoint does so until it has its own
    if not again or (named and next(complete(checkpoint_store(job)), None) is None):
        return job
    return job.model_copy(update={"checkpoint": job.checkpoint.model_copy(update={"resume": "auto"})})


def way_on(job: Job) -> str | None:
    """For a run that failed: what it can go on from, and how. None: nothing that is complete."""
    with contextlib.suppress(CheckpointError):
        for name, _ in complete(checkpoint_store(job)):
            return f"the newest complete checkpoint is {name}; --checkpoint.resume auto goes on from it"
    return None


class Keeper:
    """The checkpoints of one run, as its trainer uses them."""

    def __init__(self, run: Run) -> None:
        self.run, self.settings = run, run.plan.job.checkpoint
        self.store = checkpoint_store(run.plan.job)
        self.checkpointer: Checkpointer | None = None

    @property
    def failed(self) -> bool:
        """Whether this rank knows that the last save failed."""
        return self.checkpointer is not None and self.checkpointer.failed

    def restore(self) -> tuple[Progress, list[str]]:
        """Bring the run to where the checkpoint it resumes from had come; also what there is to say about it.

        The store is claimed once that has succeeded: a run that cannot begin takes it from no other.
        """
        run, notes = self.run, list[str]()
        found = restore(run.model, run.optimizer, run.scaler, self.store, data_facts(run), notes.append)
        self.checkpointer = self._make() if self.settings.every else None
        if found is None:
            if self.settings.resume == "auto":
                notes.append(f"no checkpoint in {self.store.root}: training starts at the beginning")
            return Progress(), notes
        notes.append(f"resumed from {found.path}: step {found.progress.step}, {found.progress.samples} samples")
        return found.progress.model_copy(update={"validation_loss": None}), notes

    def after_step(self, progress: Progress, result: StepResult, reason: str | None) -> str | None:
        """Save where it is due; why the run is to end now, or None. Collective.

        Raises:
            CheckpointError: a save failed on some rank.
        """
        if result.failed:
            assert self.checkpointer is not None
            self.checkpointer.wait()
            raise CheckpointError(f"a checkpoint in {self.store.root} failed on another rank")
        every, last = self.settings.every, progress.step == self.run.plan.job.training.steps
        due = bool(every) and (last or progress.step % every == 0)
        if not due and not result.stop:
            return None
        self.checkpointer = self.checkpointer or self._make()
        self.checkpointer.save(progress, self.run.scaler, wait=last or result.stop)
        if not result.stop:
            return None
        return f"{self._agree(reason)}; {self.store.root}/{self.checkpointer.saved} holds its state"

    def close(self) -> None:
        """Let a save that is under way come to its end."""
        if self.checkpointer is not None:
            self.checkpointer.close()

    def _make(self) -> Checkpointer:
        run = self.run
        return Checkpointer(run.model, run.optimizer, self.store, data_facts(run))

    def _agree(self, reason: str | None) -> str:
        """The lowest rank's reason to stop, told to all."""
        reasons: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(reasons, reason)
        return next(each for each in reasons if each)


def data_facts(run: Run) -> dict[str, Any]:
    """What a checkpoint says of its data; `content`, `order` and `split` must be equal to go on from it."""
    facts = run.data.describe()
    order = f"seed {run.plan.job.training.seed}, {len(run.data.train)} sequences"
    return {key: facts.get(key) for key in ("corpus", "content", "tokenizer", "split")} | {"order": order}
