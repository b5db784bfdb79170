"""Trainer: when things happen in a job's training. How each is done is in training/session.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from shardwise.data.batch import Batch
from shardwise.errors import CheckpointError, DataError, ShardwiseError
from shardwise.job.schema import Job
from shardwise.job.tasks import IGNORED
from shardwise.launch.interrupt import Interrupt
from shardwise.observe.callback import Callback
from shardwise.training.checkpoints import HostMemoryState
from shardwise.training.observers import observers
from shardwise.training.session import Session, TrainingResult
from shardwise.training.step import StepResult

MOST_SKIPPED = 50  # non-finite steps in a row after which training cannot be going anywhere


def train_rank(
    job: Job,
    device: torch.device,
    callbacks: Sequence[Callback] = (),
    request_file: Path | None = None,
    memory: HostMemoryState | None = None,
) -> TrainingResult:
    """Train `job` on this rank; the process group exists and the output directory is claimed. Collective.

    `request_file` is where the launcher asks to stop after a step, and `memory` its part in keeping the state.
    """
    with Session(job, callbacks=callbacks, device=device) as session:
        session.checkpoints.memory = memory
        session.restore()
        _check_is_ahead(session)
        session.callbacks.extend(observers(session.assembled))
        session.start()
        with Interrupt(session.rank, request_file) as interrupt:
            return Trainer(session, interrupt).run()


def _check_is_ahead(session: Session) -> None:
    """Refuse a run that has done more steps than it shall take.

    Raises:
        CheckpointError: on all ranks.
    """
    done, steps = session.progress.step, session.plan.steps
    if done > steps:
        raise CheckpointError(
            f"the checkpoint has {done} steps behind it, and training.steps={steps}; give more, or resume from an "
            "earlier one"
        )


class Trainer:
    """One rank's training loop: steps, and evaluations and checkpoints where they are due."""

    def __init__(self, session: Session, interrupt: Interrupt) -> None:
        self.session, self.interrupt = session, interrupt
        self.training, self.checkpoint = session.job.training, session.job.checkpoint

    def run(self) -> TrainingResult:
        """Train to the last step, or to a stop that the ranks have agreed on, and end the run."""
        session = self.session
        for batches in session.batches():
            self.take_step(batches)
            if session.checkpoints.memory is not None and self.is_due(self.checkpoint.memory_every):
                session.checkpoints.keep(session.progress)
            is_end = self.is_last or session.early_stop is not None
            save_is_due = bool(self.checkpoint.every) and (is_end or self.is_due(self.checkpoint.every))
            if session.stopped or save_is_due:
                path = session.save(wait=is_end or session.stopped is not None)
                if session.stopped and not is_end:
                    return session.end(f"{session.stopped}; {path} holds its state")
        if session.progress.validation_loss is None:  # it was resumed at its last step
            session.evaluate()
        return session.end()

    def take_step(self, batches: Sequence[Batch]) -> StepResult:
        """Train one step, and evaluate after it where that is due."""
        if self.interrupt.reason:
            self.session.request_stop(self.interrupt.reason)
        result = self.session.step(batches)
        self.check_skipped(result)
        if self.is_due(self.training.evaluate_every) or self.is_last:
            self.session.evaluate()
        return result

    @property
    def is_last(self) -> bool:
        """True after the last step."""
        return self.session.steps_done == self.session.plan.steps

    def is_due(self, every: int) -> bool:
        """Return whether something that happens every so many steps belongs to the one that has just ended."""
        return bool(every) and self.session.steps_done % every == 0

    def check_skipped(self, result: StepResult) -> None:
        """End a run whose gradients are never finite, or that has nothing to learn.

        Raises:
            DataError: no label is counted.
            ShardwiseError: gradients are not finite; with the loss and its scale.
        """
        if self.session.progress.skipped_in_a_row == MOST_SKIPPED:
            if not result.count:
                raise DataError(
                    f"nothing was trained on for {MOST_SKIPPED} steps, in the last of which no label is counted; give "
                    f"labels other than {IGNORED}"
                )
            raise ShardwiseError(
                f"gradients were not finite for {MOST_SKIPPED} steps in a row (loss {result.loss}, loss scale "
                f"{result.loss_scale:g}); lower optimizer.learning_rate or use precision.compute: bf16"
            )
