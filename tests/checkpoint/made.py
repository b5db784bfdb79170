"""Checkpoints for tests, made by one process or several without a training loop."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.checkpoint.manifest import Progress
from shardwise.checkpoint.save import Checkpointer
from shardwise.checkpoint.stores import checkpoint_store
from shardwise.job.schema import Job
from shardwise.training.checkpoints import data_facts
from shardwise.training.setup import set_up
from shardwise.training.step import train_step


def save_steps(job: Job, steps: Sequence[int]) -> dict[str, Tensor]:
    """Train one step and save it under each of these numbers; the weights that were saved. Run on every rank."""
    run = set_up(job, torch.device("cpu"))
    train_step(run.model, run.objective, run.stream.batches_from(0), run.optimizer, run.scaler, 0)
    checkpointer = Checkpointer(run.model, run.optimizer, checkpoint_store(job), data_facts(run))
    for step in steps:
        loss = 3.25 if step == 20 else None
        progress = Progress(step=step, samples=8 * step, tokens=128 * step, validation_loss=loss)
        checkpointer.save(progress, run.scaler, wait=True)
    with torch.no_grad():
        return {entry.name: entry.whole().clone() for entry in run.model.tensor_map}
