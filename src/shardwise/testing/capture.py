"""One real training step with everything that `shardwise verify` compares gathered on rank 0.

The step is `train_step` itself. Gradients are read when `ParallelModel.run` returns: after every reduction, before
clipping. Whole tensors come through the TensorMap, one at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.parallel.tensor_map import Slices
from shardwise.testing.copies import CopyError, compare_copies, gathered
from shardwise.training.init import fingerprint
from shardwise.training.optimizer import learning_rate
from shardwise.training.setup import AssembledJob
from shardwise.training.step import StepResult, train_step

MOST_OVERFLOWS = 40  # fp16 steps repeated while the loss scale finds its place


@dataclass
class Captured:
    """Results of one step of the engine. The dicts are empty on ranks other than 0.

    Attributes:
        gradients: whole, reduced, unclipped, without loss scale.
        parameters: whole, after the update.
        copies: for each tensor that several ranks hold, how far its copies lie apart after the update.
        gradient_copies: the same for gradients, before clipping.
        moved: by rank, whether any element changed.
        repeats: fp16 overflows before the step that counted.
        data_hash: of the samples that all ranks read.
        slices: by rank and tensor, what the rank holds of it.
    """

    loss: float
    norm: float
    skipped: bool
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    copies: dict[str, CopyError]
    gradient_copies: dict[str, CopyError]
    moved: list[bool]
    repeats: int
    data_hash: int
    slices: list[dict[str, list[Slices]]]


def capture_step(run: AssembledJob, step: int) -> Captured:
    """Run step `step` and gather what it did. Collective."""
    settings = run.plan.job.optimizer
    run.optimizer.set_learning_rate(learning_rate(settings, step, run.plan.job.training.steps, run.plan.warmup_steps))
    before = _digest(run)
    result, gradients, gradient_copies = _step(run, step)
    repeats = 0
    while result.skipped and _scale_can_shrink(run) and repeats < MOST_OVERFLOWS:
        result, gradients, gradient_copies = _step(run, step)
        repeats += 1
    return Captured(
        result.loss,
        result.grad_norm,
        result.skipped,
        gradients,
        gather(run),
        compare_copies(run),
        gradient_copies,
        _flags(_digest(run) != before, run),
        repeats,
        result.data_hash,
        gathered({entry.name: [region.logical for region in entry.regions] for entry in run.model.tensor_map}),
    )


def _scale_can_shrink(run: AssembledJob) -> bool:
    return run.plan.dtypes.compute == "fp16" and run.scaler.settings.static is None and not run.scaler.exhausted()


def gather(run: AssembledJob, gradients: bool = False, divisor: float = 1.0) -> dict[str, Tensor]:
    """Whole parameters or gradients by logical name, on the CPU of rank 0; empty elsewhere. Collective."""
    kept = {}
    for name, whole in run.model.whole_tensors(gradients):
        if dist.get_rank() == 0:
            kept[name] = whole.detach().to("cpu", copy=True).div_(divisor)
    return kept


def _step(run: AssembledJob, step: int) -> tuple[StepResult, dict[str, Tensor], dict[str, CopyError]]:
    with _gradients_seen(run) as (gradients, copies):
        batches = run.stream.batches(step)
        result = train_step(run.model, run.objective, batches, run.optimizer, run.scaler, step)
    return result, gradients, copies


@contextmanager
def _gradients_seen(run: AssembledJob) -> Iterator[tuple[dict[str, Tensor], dict[str, CopyError]]]:
    """Gather the gradients, and compare their copies, whenever the model's `run` has returned."""
    gradients: dict[str, Tensor] = {}
    copies: dict[str, CopyError] = {}
    original = run.model.run

    def watched(*args: Any, **kwargs: Any) -> Tensor:
        totals = original(*args, **kwargs)
        gradients.update(gather(run, gradients=True, divisor=run.scaler.scale))
        copies.update(compare_copies(run, gradients=True))
        return totals

    run.model.run = watched  # type: ignore[method-assign]
    try:
        yield gradients, copies
    finally:
        del run.model.run


def _digest(run: AssembledJob) -> str:
    """Hash of what this rank holds."""
    return fingerprint((entry.name, entry.local) for entry in run.model.tensor_map)


def _flags(mine: bool, run: AssembledJob) -> list[bool]:
    """Every rank's flag."""
    flag = torch.tensor([int(mine)], device=run.model.device)
    everyone = [torch.empty_like(flag) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, flag)
    return [bool(value) for value in everyone]
