"""One real training step with everything that `shardwise verify` compares gathered on rank 0.

The step is the trainer's own, with the evaluation that is due after it. Gradients are read when `ParallelModel.run`
returns: after every reduction, before clipping; once more when the optimizer begins: as it gets them. Whole tensors
come through the TensorMap, one at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.data.batch import Batch
from shardwise.parallel.tensor_map import Slices
from shardwise.testing.copies import CopyError, buffer_digests, compare_copies, gathered_on_first
from shardwise.testing.precision_record import PrecisionRecord, recorded_precision
from shardwise.training.setup import AssembledJob
from shardwise.training.trainer import Trainer


class ClipFactor(NamedTuple):
    """The factor between a rank's gradients as they were reduced and as the optimizer gets them.

    `misfit` is the largest element that the factor does not explain, relative to the largest of all.
    """

    factor: float
    misfit: float


@dataclass
class Captured:
    """Results of one step of the engine. What is gathered of ranks is empty on others than rank 0.

    Attributes:
        count: what the loss is divided by.
        gradients: whole, reduced, unclipped, without loss scale.
        parameters: whole, after the update.
        copies: for each tensor that several ranks hold, how far its copies lie apart after the update.
        gradient_copies: the same for gradients, before clipping.
        moved: by rank, whether any element changed.
        batches: by rank, its microbatches as they were fed.
        clipping: by rank; None where the optimizer was not called or the rank's gradients are zero.
        data_ranks: by rank, the share of the batch that it reads.
        options: by rank, the options of the optimizer by tensor; None where it was not called.
        precision: by rank, the dtypes that were met.
        evaluation_modes: by rank, (any module trained during the evaluation, modes differ after it); None without one.
        evaluation_batches: by rank, the microbatches of that evaluation.
        validation_loss, ema_loss: what it came to, and with the averaged weights.
        slices: by rank and tensor, what the rank holds of it.
        weights: this rank's own, by tensor, before the step.
        buffers: by rank, digests of its buffers by name and place among tensor ranks, after the update.
        ema: whole averaged weights (EMA), after the update.
        router_biases: by rank, the biases that correct the scores of its routers, after the step.
    """

    step: int
    loss: float
    norm: float
    count: int
    skipped: bool
    loss_scale: float
    data_hash: int
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    copies: dict[str, CopyError]
    gradient_copies: dict[str, CopyError]
    moved: list[bool]
    batches: list[list[Batch]] = field(default_factory=list)
    clipping: list[ClipFactor | None] = field(default_factory=list)
    data_ranks: list[int] = field(default_factory=list)
    options: list[dict[str, dict[str, Any]] | None] = field(default_factory=list)
    precision: list[PrecisionRecord] = field(default_factory=list)
    evaluation_modes: list[tuple[bool, bool] | None] = field(default_factory=list)
    evaluation_batches: list[list[Batch]] = field(default_factory=list)
    validation_loss: float | None = None
    ema_loss: float | None = None
    ema: dict[str, Tensor] = field(default_factory=dict)
    slices: list[dict[str, list[Slices]]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    router_biases: list[dict[str, Tensor]] = field(default_factory=list)
    buffers: list[dict[tuple[str, int], bytes]] = field(default_factory=list)


def capture_step(trainer: Trainer, batches: Sequence[Batch]) -> Captured:
    """Let the trainer take its next step, and gather what it did. Collective."""
    session = trainer.session
    run, step = session.assembled, session.steps_done
    weights = {entry.name: entry.local.clone() for entry in run.model.tensor_map}
    with _StepWatcher(run) as watcher:
        result = trainer.take_step(list(batches))
    parameters, copies, averages = gather(run), compare_copies(run), _gather_averages(run)
    entries = list(run.model.tensor_map)
    of_rank = {
        "moved": any(not torch.equal(entry.local, weights[entry.name]) for entry in entries),
        "batches": [batch.to("cpu") for batch in batches],
        "data_ranks": run.layout.data_rank,
        "clipping": watcher.clipping,
        "options": watcher.options,
        "precision": watcher.precision,
        "evaluation_modes": watcher.evaluation_modes,
        "evaluation_batches": watcher.evaluation_batches,
        "router_biases": _router_biases(run),
        "buffers": watcher.buffers,
        "slices": {entry.name: [region.logical for region in entry.regions] for entry in entries},
    }
    everyone = gathered_on_first(of_rank)  # in one message
    by_rank: dict[str, Any] = {key: [record[key] for record in everyone] for key in of_rank}
    return Captured(
        step=step,
        loss=result.loss,
        norm=result.grad_norm,
        count=result.count,
        skipped=result.skipped,
        loss_scale=result.loss_scale,
        data_hash=result.data_hash,
        gradients=watcher.gradients,
        parameters=parameters,
        copies=copies,
        gradient_copies=watcher.gradient_copies,
        validation_loss=session.progress.validation_loss,
        ema_loss=session.evaluated.get("validation_loss/ema"),
        ema=averages,
        weights=weights,
        **by_rank,
    )


def gather(run: AssembledJob, gradients: bool = False, divisor: float = 1.0) -> dict[str, Tensor]:
    """Whole parameters or gradients by logical name, on the CPU of rank 0; empty elsewhere. Collective."""
    kept = {}
    for name, whole in run.model.whole_tensors(gradients):
        if dist.get_rank() == 0:
            kept[name] = whole.detach().to("cpu", copy=True)
            if divisor != 1.0:  # parameters may be whole numbers
                kept[name].div_(divisor)
    return kept


def _gather_averages(run: AssembledJob) -> dict[str, Tensor]:
    """Whole averaged weights of what is trained, where the job keeps them; on rank 0. Collective."""
    if run.model.ema is None:
        return {}
    with run.model.ema_in_place():
        wholes = gather(run)
    return {name: whole for name, whole in wholes.items() if name not in run.facts.frozen}


def _router_biases(run: AssembledJob) -> dict[str, Tensor]:
    """Return this rank's biases of routers, where the job moves them."""
    if not run.plan.job.router.bias_update_rate:
        return {}
    names = set(run.facts.router_biases.values())
    buffers = (named for part in run.model.parts for named in part.module.named_buffers())
    return {name: buffer.detach().to("cpu", copy=True) for name, buffer in buffers if name in names}


class _StepWatcher:
    """Reads a step's gradients, clipping, dtypes and evaluation while it runs; a context around it."""

    def __init__(self, run: AssembledJob) -> None:
        self.run = run
        self.gradients: dict[str, Tensor] = {}
        self.gradient_copies: dict[str, CopyError] = {}
        self.clipping: ClipFactor | None = None
        self.options: dict[str, dict[str, Any]] | None = None
        self.evaluation_modes: tuple[bool, bool] | None = None
        self.precision = PrecisionRecord()
        self.evaluation_batches: list[Batch] = []
        self.buffers: dict[tuple[str, int], bytes] = {}
        self._reduced: dict[str, Tensor] = {}  # this rank's own gradients, before clipping
        self._inside: list[bool] = []  # of modules in an evaluation
        self._exit = ExitStack()

    def __enter__(self) -> _StepWatcher:
        run = self.run
        self._before = self._modes()
        self._exit.enter_context(mock.patch.object(run.model, "run", self._watch_run(run.model.run)))
        self._exit.enter_context(mock.patch.object(run.optimizer, "step", self._watch_update(run.optimizer.step)))
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()
        if self._inside:
            self.evaluation_modes = any(self._inside), self._modes() != self._before

    def _modes(self) -> list[bool]:
        return [module.training for part in self.run.model.parts for module in part.module.modules()]

    def _watch_run(self, compute: Any) -> Any:
        def run(objective: Any, microbatches: Any, step: int, seed: Tensor | None = None) -> Tensor:
            averages = self.run.model.ema
            if seed is None and averages is not None and averages.in_place:
                totals: Tensor = compute(objective, microbatches, step, seed)  # the same rows once more
                return totals
            if seed is None:
                self._inside += self._modes()
                self.evaluation_batches += [batch.to("cpu") for batch in microbatches]
                totals = compute(objective, microbatches, step, seed)
                return totals
            with recorded_precision(self.run, self.precision, objective) as watched:
                totals = compute(watched, microbatches, step, seed)
            self.gradients.update(gather(self.run, gradients=True, divisor=self.run.scaler.scale))
            self.gradient_copies.update(compare_copies(self.run, gradients=True))
            self._reduced = {entry.name: gradient.clone() for entry, gradient in self.run.optimizer.gradients()}
            return totals

        return run

    def _watch_update(self, update: Any) -> Any:
        def step() -> None:
            clipped = {entry.name: gradient for entry, gradient in self.run.optimizer.gradients()}
            self.clipping = _clip_factor(self._reduced, clipped)
            self.options = _options(self.run)
            update()
            self.precision.read_state(self.run)
            self.buffers = buffer_digests(self.run)  # before an evaluation, whose forward may change them

        return step


def _clip_factor(reduced: Mapping[str, Tensor], clipped: Mapping[str, Tensor]) -> ClipFactor | None:
    """Return the factor between gradients before and behind clipping; those that no rank has used are gone by then.

    Complex ones are of another dtype than the job's, which rounds the factor.
    """
    real = [name for name, gradient in clipped.items() if gradient.is_floating_point()]
    pairs = [(reduced[name].double(), clipped[name].double()) for name in real]
    squares = sum(float(a.square().sum()) for a, _ in pairs)
    if squares == 0:
        return None
    factor = sum(float((a * b).sum()) for a, b in pairs) / squares
    largest = max(float(b.abs().max()) for _, b in pairs)
    misfit = max(float((b - factor * a).abs().max()) for a, b in pairs)
    return ClipFactor(factor, misfit / largest if largest else 0.0)


def _options(run: AssembledJob) -> dict[str, dict[str, Any]]:
    """Return what torch's optimizer has been told, by tensor: learning rate, weight decay, eps and the like."""
    names = {id(local): entry.name for entry, local in run.optimizer.locals}
    return {
        names[id(parameter)]: {key: value for key, value in group.items() if key != "params"}
        for group in run.optimizer.inner.param_groups
        for parameter in group["params"]
        if id(parameter) in names
    }
