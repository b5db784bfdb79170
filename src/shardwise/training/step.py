"""train_step(): forward, backward, reductions and update of one step, on any layout.

The loss is (sum, count). One control all-reduce before the step carries the count of labels and the ranks' flags; the
normalisation is the seed of backward; one all-reduce after backward carries gradient norm and loss. There a host waits
for its accelerator, once, and prepares the next step while the accelerator updates. Hosts of ranks that work on the
same rows wait for each other ahead of the step as well: they may not begin on unequal ones.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise._torch_compat import accelerator
from shardwise.collectives.carriers import carries_host_memory
from shardwise.collectives.names import CollectiveName
from shardwise.collectives.rank_record import WorkUnit, begin_unit, mark_phase
from shardwise.data.batch import Batch, moved, wrap
from shardwise.errors import ConfigError, DataError, ModelError, require_type
from shardwise.job.devices import widest_float
from shardwise.kernels.precision import LossScaler
from shardwise.parallel.model import ParallelModel
from shardwise.parallel.objective import Objective
from shardwise.parallel.routers import RouterTotals
from shardwise.parallel.tensor_map import ParameterEntry
from shardwise.plan.normalisation import NORMALISATIONS, LossCounts, Normalisation
from shardwise.training.optimizer import ShardedOptimizer
from shardwise.training.rank_figures import Figures, figures_of, own_figures

NORM_CHUNK = 1 << 16  # elements that a CPU sums in the gradients' own dtype; measured: as fast as the fp32 norm


FORMATS = {torch.int64: "q", torch.float64: "d", torch.float32: "f"}  # of what a step reads, as struct has them

CONTROL = CollectiveName("the step's control message", "world", "all_reduce")
LOSS_AND_NORM = CollectiveName("loss and gradient norm", "world", "all_reduce")
EVALUATION = CollectiveName("the evaluation's loss", "world", "all_reduce")

SAME_SAMPLES = (
    "ranks that work on the same rows, such as the stages of a pipeline, have read different samples; a data set has "
    "to give the same sample whenever and wherever it is asked for an index: seed what it draws with the index "
    "(torch.Generator().manual_seed(index))"
)
DETACHED = (
    "the losses of this step have no gradient on any rank: they were detached from the parameters, by detach(), "
    "item(), no_grad() or an argmax, say; nothing can be learnt from them"
)


@dataclass
class StepResult:
    """Outcome of one step, equal on every rank.

    Attributes:
        loss: mean loss of the step's counted labels, samples or pairs, nats.
        grad_norm: global L2 norm before clipping; the one that clips.
        count: counted labels on all ranks.
        divisor: number of what `loss` is the mean of, on all ranks.
        skipped: the gradients were not finite, or no label was counted, and nothing was updated.
        loss_scale: scale of this step's backward.
        stop: some rank asked to stop after this step.
        failed: some rank's last checkpoint failed.
        data_hash: of the step's samples, equal on every layout.
        routers: use of the experts in the step; None for a model without watched routers.
        metrics: what the objective measures beside its loss, by name.
        figures: of each rank, before the update; empty on a CPU, which measures the whole step.
        rows: of all ranks; 0 for batches that a stream of data has numbered.
    """

    loss: float
    grad_norm: float
    count: int
    divisor: int
    skipped: bool
    loss_scale: float
    stop: bool = False
    failed: bool = False
    data_hash: int = 0
    routers: RouterTotals | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    figures: Figures = field(default_factory=dict)
    rows: int = 0


class EvaluationResult(NamedTuple):
    """Outcome of one evaluation, equal on every rank.

    Attributes:
        loss: mean loss of its counted labels, nats; NaN without any.
        metrics: what the objective measures beside it, by name.
    """

    loss: float
    metrics: Mapping[str, float]


class ControlMessage(NamedTuple):
    """Message of a rank to all before a step; values are summed over the ranks that read different rows.

    Attributes:
        labels: that are counted.
        samples: with a counted label, where the loss is a mean over samples; else the same as `labels`.
        data_hash: of the samples.
    """

    labels: int
    samples: int
    stop: int
    failed: int
    data_hash: int

    @property
    def counts(self) -> LossCounts:
        return LossCounts(tokens=self.labels, samples=self.samples)


class Control(NamedTuple):
    """The sum of the ranks' messages.

    Attributes:
        message: the sum; None where the host has not read it.
        on_device: the same then, int64.
        rows: int64 of each microbatch, and of each rank within; beside `on_device`, or on the host. None where batches
            are numbered.
    """

    message: ControlMessage | None
    on_device: Tensor | None = None
    rows: Tensor | None = None

    def numbered(self, batches: Sequence[Batch], samples: int, model: ParallelModel) -> list[Batch]:
        """Return the batches on the model's device, with rows that follow on those of earlier ones and ranks."""
        if self.rows is None:
            return [batch.to(model.device) for batch in batches]
        if self.on_device is not None:
            batches = [batch.to(model.device) for batch in batches]
        firsts = (samples + self.rows.cumsum(0) - self.rows).view(len(batches), -1)[:, model.layout.data_rank]
        pairs = zip(batches, firsts, strict=True)
        batches = [batch if batch.is_numbered else batch.numbered_from(first) for batch, first in pairs]
        return [batch.to(model.device) for batch in batches]

    def seed(self, model: ParallelModel, loss_scale: float) -> Tensor:
        """Return the gradient of each microbatch's summed loss, 0-dim."""
        if self.on_device is None:
            assert self.message is not None
            value = NORMALISATIONS[model.plan.normalisation].seed(self.message.counts, loss_scale)
            return torch.full((), value, dtype=model.accumulation_dtype, device=model.device)
        # `samples` is what the loss is divided by, be it labels or samples.
        divisor = self.on_device[ControlMessage._fields.index("samples")].clamp(min=1).to(widest_float(model.device))
        # Torch's number / tensor rounds twice.
        return (torch.full_like(divisor, loss_scale) / divisor).to(model.accumulation_dtype)


class ReducedSums(NamedTuple):
    """Sums over all ranks behind backward.

    Attributes:
        loss, counted: the losses, and what they are summed over.
        norm: of the gradients.
        measured: what the objective has measured; empty without any.
        control: of the messages before the step.
        routers: use of the experts; None for a model without watched routers.
        figures: of each rank, as a step's result has them.
        rows: of all ranks; 0 where batches are numbered.
    """

    loss: float
    counted: float
    norm: float
    measured: Sequence[float]
    control: ControlMessage
    routers: RouterTotals | None
    figures: Figures
    rows: int


@torch.enable_grad()  # a caller's no_grad would leave all parameters without gradients
def train_step(
    model: ParallelModel,
    objective: Objective,
    batches: Sequence[Batch],
    optimizer: ShardedOptimizer,
    scaler: LossScaler,
    step: int,
    stop: bool = False,
    failed: bool = False,
    samples: int | None = None,
) -> StepResult:
    """Take one optimizer step with this rank's microbatches. Collective: every rank calls it with equally many.

    Args:
        model: initialized; in training mode.
        objective: what a microbatch gives the model, and what its loss is.
        batches: this rank's microbatches, on any device.
        optimizer: its learning rate is already set.
        scaler: the loss scale, updated here.
        step: number of the step from 0.
        stop: this rank's wish to end the run after the step.
        failed: this rank's last checkpoint could not be written.
        samples: rows of all steps before, on which those of batches follow that are not numbered; unset: none are.

    Raises:
        ConfigError: `model` is no ParallelModel, or torch is in inference mode.
        ModelError: the losses of all ranks are detached.
    """
    _check_trainable(model)
    normalisation = NORMALISATIONS[model.plan.normalisation]
    labels, data_hash = sum(int(batch.count()) for batch in batches), wrap(sum(batch.digest for batch in batches))
    batches = weighted(batches, normalisation)
    counted = round(sum(float(batch.count()) for batch in batches))
    sizes = None if samples is None else [len(batch.rows) for batch in batches]
    control = exchange_control(model, ControlMessage(labels, counted, int(stop), int(failed), data_hash), sizes)
    batches = control.numbered(batches, samples or 0, model)
    model.scale_router_losses(scaler.scale)
    optimizer.begin(scaler.scale)
    seed = control.seed(model, scaler.scale)
    totals = model.run(objective, batches, step, seed)
    sums = reduce_loss_and_norm(model, optimizer, totals, scaler.scale, control, objective.measured())
    agreed, counts = sums.control, sums.control.counts
    _check_losses(model, sums, step)
    scale, skipped = scaler.scale, _update(model, optimizer, scaler, sums)
    return StepResult(
        normalisation.mean(sums.loss, counts),
        sums.norm,
        counts.tokens,
        normalisation.divisor(counts),
        skipped,
        scale,
        bool(agreed.stop),
        bool(agreed.failed),
        agreed.data_hash,
        sums.routers,
        objective.metrics(sums.measured, counts.samples),
        sums.figures,
        sums.rows,
    )


def _check_trainable(model: ParallelModel) -> None:
    require_type(model, ParallelModel, "model", "shardwise.parallelize makes it of a module")
    if torch.is_inference_mode_enabled():
        raise ConfigError("a step in torch.inference_mode() has no gradients; call it outside of that")


def _update(model: ParallelModel, optimizer: ShardedOptimizer, scaler: LossScaler, sums: ReducedSums) -> bool:
    """Update the parameters, or return True where there is nothing to update them by."""
    is_finite = math.isfinite(sums.norm)
    skipped = sums.control.counts.tokens == 0 or not is_finite
    if not skipped:
        _rescale(optimizer, sums.norm, scaler.scale, model.plan.job.optimizer.clip_norm)
        optimizer.step()
        model.update_router_biases()
    scaler.update(overflow=not is_finite)
    optimizer.zero_grad()
    return skipped


def evaluate(model: ParallelModel, objective: Objective, batches: Sequence[Sequence[Batch]]) -> EvaluationResult:
    """Return the mean loss and the metrics over global batches, each given as this rank's microbatches."""
    model.train(False)
    normalisation = NORMALISATIONS[model.plan.normalisation]
    totals = torch.zeros(2, dtype=widest_float(model.device), device=model.device)
    for index, microbatches in enumerate(batches):
        if index:  # the first batch's unit has begun when it was read
            begin_unit(WorkUnit.EVALUATION)
        on_device = [batch.to(model.device) for batch in weighted(microbatches, normalisation)]
        totals += model.run(objective, on_device, step=0)
    model.reshard()
    model.meet()
    measured = objective.measured()
    totals = totals if measured is None else torch.cat([totals, measured.to(totals)])
    totals *= model.contributes
    with EVALUATION:
        dist.all_reduce(totals)
    model.train()
    total, count, *sums = totals.tolist()
    loss = normalisation.mean(total, LossCounts(tokens=round(count), samples=round(count)))
    return EvaluationResult(loss if count else math.nan, objective.metrics(sums, round(count)))


def weighted(batches: Sequence[Batch], normalisation: Normalisation) -> Sequence[Batch]:
    """Return the batches with the weights of their samples, where the loss is a mean over samples."""
    return [batch.with_sample_weights() for batch in batches] if normalisation.weighs_samples else batches


def exchange_control(model: ParallelModel, message: ControlMessage, sizes: Sequence[int] | None = None) -> Control:
    """Sum the ranks' messages, in int64, whose sums wrap around. Collective.

    Args:
        sizes: rows of each of this rank's microbatches, where all ranks are to know those of all.

    Raises:
        DataError: ranks that work on the same rows have other samples than each other; on every rank.
    """
    mark_phase("forward")
    if dist.get_world_size() == 1:  # a GPU would be waited for
        return Control(message, rows=None if sizes is None else torch.tensor(sizes))
    reports = model.is_reporting_rank
    labels, samples, stop, failed, data_hash = message
    # The hashes of ranks that work on the same rows cancel out.
    others = dist.get_world_size() // model.layout.data_ranks - 1
    unequal = wrap(data_hash * others if model.layout.is_first_of_rows else -data_hash)
    # A wish to stop or a failure may come from any rank.
    values = [labels if reports else 0, samples if reports else 0, stop, failed, data_hash if reports else 0, unequal]
    # A host that reads the sum need not wait for its accelerator, which may still be at the last update.
    on_host = others and carries_host_memory()
    rows = torch.zeros(len(sizes or ()), model.layout.data_ranks, dtype=torch.int64)
    if sizes and reports:
        rows[:, model.layout.data_rank] = torch.tensor(sizes)
    sent = torch.cat([torch.tensor(values, dtype=torch.int64), rows.flatten()])
    control = moved(sent, accelerator.HOST if on_host else model.device)
    with _control_of(sizes):
        dist.all_reduce(control)
    end = len(values)
    if not others:
        return Control(None, control[: end - 1], control[end:] if sizes else None)
    sums = control.tolist()
    if sums[end - 1]:
        raise DataError(SAME_SAMPLES)
    return Control(ControlMessage(*sums[: end - 1]), rows=torch.tensor(sums[end:]) if sizes else None)


def _control_of(sizes: Sequence[int] | None) -> CollectiveName:
    """Return the message's name, by which ranks that bring unequally many microbatches are told apart."""
    return CONTROL if sizes is None else replace(CONTROL, unit=f"{CONTROL.unit} (microbatches of a rank: {len(sizes)})")


def reduce_loss_and_norm(
    model: ParallelModel,
    optimizer: ShardedOptimizer,
    totals: Tensor,
    scale: float,
    control: Control,
    measured: Tensor | None = None,
) -> ReducedSums:
    """Return the sums of all ranks, and the gradient norm; a gradient's element counts once.

    The ranks' use of parameters is settled before anything is read, and all is read at once. Collective.
    """
    mark_phase("optimizer")
    squares = squared_share(optimizer.gradients(), model.device)
    use = moved(torch.tensor(model.use_counts(), dtype=squares.dtype), model.device)
    own = [part.to(squares.dtype) * model.contributes for part in (totals, measured) if part is not None]
    parts = [squares.view(1), use, own_figures(model.device), torch.cat(own)]
    sums = torch.cat(parts)
    with LOSS_AND_NORM:
        dist.all_reduce(sums)
    nothing = torch.empty(0, dtype=torch.int64, device=model.device)
    of_routers = nothing if model.routers is None else model.routers.measured()
    message = nothing if control.on_device is None else control.on_device
    rows = nothing if control.rows is None else moved(control.rows, model.device)
    values = read_at_once([*sums.split([len(part) for part in parts]), of_routers, message, rows])
    [squared], used, figures, [loss, counted, *of_objective], routes, agreed, sizes = values
    model.settle_use(*(count > 0 for count in used))
    return ReducedSums(
        loss,
        counted,
        math.sqrt(squared) / scale,
        of_objective,
        control.message or ControlMessage(*agreed),
        None if model.routers is None else model.routers.totals(routes),
        figures_of(figures),
        sum(sizes),
    )


def read_at_once(tensors: Sequence[Tensor]) -> list[list[Any]]:
    """Return the values of tensors in one dim, int64, fp64 or fp32, for which the host waits once."""
    words = torch.cat([tensor.view(torch.int32) for tensor in tensors]).tolist()
    memory, values = struct.pack(f"{len(words)}i", *words), []
    for tensor in tensors:
        own, memory = memory[: tensor.nbytes], memory[tensor.nbytes :]
        values.append([*struct.unpack(f"{len(tensor)}{FORMATS[tensor.dtype]}", own)])
    return values


def squared_share(gradients: Iterable[tuple[ParameterEntry, Tensor]], device: torch.device) -> Tensor:
    """Return this rank's share, 0-dim, of the squared norm; the ranks' shares have every element once."""
    squares = torch.zeros((), dtype=widest_float(device), device=device)
    by_replication: dict[int, list[Tensor]] = {}
    for entry, gradient in gradients:
        by_replication.setdefault(entry.replication, []).append(gradient)
    for replication, alike in by_replication.items():
        squares += _sum_of_squares(alike).to(device) / replication
    return squares


def _sum_of_squares(gradients: list[Tensor]) -> Tensor:
    """Sum the squares, widely from chunk to chunk: a CPU's fp32 norm of a few million elements is off by 5e-5."""
    wide = widest_float(gradients[0].device)
    gradients = [torch.view_as_real(gradient) if gradient.is_complex() else gradient for gradient in gradients]
    if accelerator.on_accelerator(gradients[0]):
        return torch.stack(torch._foreach_norm(gradients, 2, dtype=wide)).square().sum()
    chunks = (chunk for gradient in gradients for chunk in gradient.reshape(-1).split(NORM_CHUNK))
    return torch.stack([torch.dot(chunk, chunk) for chunk in chunks]).sum(dtype=wide)


def _check_losses(model: ParallelModel, sums: ReducedSums, step: int) -> None:
    """Refuse losses that count otherwise than the batches do, at the first step, or that nothing can be learnt from."""
    if step == 0:
        _check_count(round(sums.counted), sums.control.counts.samples)
    if sums.norm == 0 and sums.control.counts.tokens and model.detached:
        raise ModelError(DETACHED)


def _check_count(counted: int, count: int) -> None:
    """Refuse a `model.loss` that counts otherwise than the batches, whose count has seeded backward."""
    if counted != count:
        raise ModelError(
            f"model.loss counts {counted}, the batches of all ranks have {count} counted labels (rows, if they are no "
            "class ids); return batch.count() as the count, and the sum over what it counts"
        )


def _rescale(optimizer: ShardedOptimizer, norm: float, scale: float, clip_norm: float | None) -> None:
    """Take the loss scale out of the gradients and clip them, in one multiplication."""
    factor = (1.0 if clip_norm is None else min(clip_norm / (norm + 1e-6), 1.0)) / scale
    optimizer.scale_gradients(factor)
