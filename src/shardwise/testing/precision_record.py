"""Dtypes of what a step really computed on a rank: read off modules, losses, collectives and the optimizer's state.

A plan says `compute bf16, reduction fp32, loss fp32`; here is what ran. The dtype of a tensor does not say in which
dtype its numbers were made, so the losses are also kept themselves, with what plain cross-entropy in fp64 gives for the
same outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.collectives import fsdp
from shardwise.job.axes import Axis
from shardwise.job.optimizer_records import RECORDS
from shardwise.job.tasks import IGNORED
from shardwise.kernels.precision import DTYPES
from shardwise.model.parameter_optimizers import ParameterOptimizer, optimizers_of_parameters
from shardwise.parallel.deferred_head import DeferredHead
from shardwise.parallel.objective import Objective
from shardwise.parallel.tensor_map import ParameterEntry
from shardwise.training.objectives.language_modelling import LanguageModelling
from shardwise.training.setup import AssembledJob

COARSE = (torch.bfloat16, torch.float16)
ROWS = 1024  # of logits that are made again at once
REDUCE_SCATTERS = ("reduce_scatter_single", "reduce_scatter_tensor")  # names of one function, by version of torch


@dataclass
class PrecisionRecord:
    """Dtypes by what was met first in each.

    Attributes:
        compute: dtype -> the first module in a block whose parameters had it when it was called.
        reduction: dtype -> the operation that summed gradients in it.
        loss: dtypes of the microbatches' losses.
        parameters: dtypes of the weights that the optimizer updates.
        optimizer: dtype -> the name of such state.
        coarse_state: name of optimizer state -> the 16-bit dtypes of which it holds numbers alone.
        losses: of the microbatches.
        expected_loss: of the first microbatch, from its outputs in fp64; None where that is not taken.
        expected_without: the same without one of its terms, by the key that asks for it.
    """

    compute: dict[torch.dtype, str] = field(default_factory=dict)
    reduction: dict[torch.dtype, str] = field(default_factory=dict)
    loss: dict[torch.dtype, str] = field(default_factory=dict)
    parameters: dict[torch.dtype, str] = field(default_factory=dict)
    optimizer: dict[torch.dtype, str] = field(default_factory=dict)
    coarse_state: dict[str, list[torch.dtype]] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    expected_loss: float | None = None
    expected_without: dict[str, float] = field(default_factory=dict)

    def read_state(self, run: AssembledJob) -> None:
        """Read the dtypes of the weights and of the optimizer's state after an update.

        State whose dtype the optimizer has by definition, such as scales of blocks, is left out where it has it.
        """
        for entry, local in run.optimizer.locals:
            if not run.facts.kept_dtype(entry.name):
                self.parameters.setdefault(local.dtype, entry.name)
        states: dict[str, list[Tensor]] = {}
        chosen = optimizers_of_parameters(run.facts, run.plan.job.optimizer)
        for entry, local in run.optimizer.locals:
            defined = _defined_dtypes(chosen[entry.name], entry)
            for name, value in run.optimizer.inner.state.get(local, {}).items():
                is_moment = isinstance(value, Tensor) and value.dim() and value.is_floating_point()
                if is_moment and defined.get(name) is not value.dtype:
                    states.setdefault(name, []).append(value)
        for name, values in states.items():
            self.optimizer |= {value.dtype: name for value in values}
            if any(value.any() for value in values):
                self.coarse_state[name] = [dtype for dtype in COARSE if holds_numbers_of(dtype, values)]


def _defined_dtypes(own: ParameterOptimizer, entry: ParameterEntry) -> dict[str, torch.dtype]:
    """Return the dtypes that state beside a parameter has whatever those of the plan are, by key."""
    record = RECORDS.get(own.name)
    state = {} if record is None else record.state(own.options, entry.shape, entry.shape)
    return {key: DTYPES[kept.dtype] for key, kept in state.items() if kept.dtype in DTYPES}


@contextmanager
def recorded_precision(run: AssembledJob, record: PrecisionRecord, objective: Objective) -> Iterator[Objective]:
    """Record forward and backward of a step; yield the objective with which they are to run."""
    with ExitStack() as stack:
        if not run.plan.job.model.compile:  # hooks in compiled blocks would compile them again
            _record_compute(stack, run, record)
        _record_reductions(stack, run, record)
        yield _RecordedObjective(objective, record)


def _record_compute(stack: ExitStack, run: AssembledJob, record: PrecisionRecord) -> None:
    """Look at the matrices of modules in blocks whenever these are called."""
    inside = tuple(f"{block.name}." for block in run.facts.blocks)

    def note(name: str, module: nn.Module, args: Any) -> None:
        for parameter in module.parameters(recurse=False):
            if parameter.dim() > 1 and parameter.is_floating_point():
                record.compute.setdefault(parameter.dtype, name)

    for part in run.model.parts:
        for name, module in part.module.named_modules():
            if name.startswith(inside) and any(p.dim() > 1 for p in module.parameters(recurse=False)):
                stack.callback(module.register_forward_pre_hook(partial(note, name)).remove)


def _record_reductions(stack: ExitStack, run: AssembledJob, record: PrecisionRecord) -> None:
    """Look at what FSDP2 reduce-scatters, and what is summed over replicas."""
    replicas = run.layout.group(Axis.REPLICA) if run.plan.degrees[Axis.REPLICA] > 1 else None

    def recorded(operation: str, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        tensor = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        if tensor.is_floating_point() and (operation != "all_reduce" or kwargs.get("group") is replicas):
            record.reduction.setdefault(tensor.dtype, operation)
        return real(*args, **kwargs)

    for owner in (dist, fsdp):
        for name in REDUCE_SCATTERS:
            if real := getattr(owner, name, None):
                stack.enter_context(mock.patch.object(owner, name, partial(recorded, "reduce_scatter", real)))
    if replicas is not None:
        stack.enter_context(mock.patch.object(dist, "all_reduce", partial(recorded, "all_reduce", dist.all_reduce)))


class _RecordedObjective(Objective):
    """An objective that keeps the losses it gives, and takes the first one again."""

    def __init__(self, objective: Objective, record: PrecisionRecord) -> None:
        self.objective, self.record = objective, record
        self.needs_whole_batches = objective.needs_whole_batches

    def prepared(self, microbatches: Sequence[Any], step: int) -> Sequence[Any]:
        """Return what the objective makes of them."""
        return self.objective.prepared(microbatches, step)

    def inputs(self, microbatch: Any) -> dict[str, Any]:
        """Return what the objective gives."""
        return self.objective.inputs(microbatch)

    def loss(self, microbatch: Any, output: Any) -> tuple[Tensor, Tensor]:
        """Return what the objective gives."""
        record = self.record
        if not record.losses and isinstance(self.objective, LanguageModelling):
            _record_expected_loss(record, self.objective, microbatch.labels, output.logits)
        loss, count = self.objective.loss(microbatch, output)
        if isinstance(self.objective, LanguageModelling):  # what a user's own returns is the user's
            record.loss.setdefault(loss.dtype, "of a microbatch")
        record.losses.append(float(loss.detach()))
        return loss, count


def _record_expected_loss(
    record: PrecisionRecord, objective: LanguageModelling, labels: Tensor, output: Tensor
) -> None:
    """Take the summed loss by torch's cross-entropy in fp64 of the logits, or of hidden states before the head.

    Products with the head are in the compute dtype, as everywhere. Nothing is taken where ranks share the vocabulary,
    or samples or pairs count in the place of labels.
    """
    head, plan = objective.model.head, objective.model.plan
    training = plan.job.training
    if (head is not None and head.vocabulary is not None) or plan.normalisation != "token":
        return
    plain, smoothed, squares = _loss_terms(head, training.label_smoothing, labels, output.detach())
    record.expected_loss = smoothed + training.z_loss * squares
    if training.z_loss:
        record.expected_without["training.z_loss"] = smoothed
    if training.label_smoothing:
        record.expected_without["training.label_smoothing"] = plain + training.z_loss * squares


@torch.no_grad()
def _loss_terms(head: DeferredHead | None, smoothing: float, labels: Tensor, output: Tensor) -> tuple[float, ...]:
    """Return the sums of cross-entropy, of cross-entropy with smoothed labels, and of squared log-normalisers."""
    sums = [0.0, 0.0, 0.0]
    rows, targets = output.flatten(0, -2), labels.flatten()
    for start in range(0, len(rows), ROWS):
        part, wanted = rows[start : start + ROWS], targets[start : start + ROWS]
        logits = (part if head is None else F.linear(part, head.weight.detach(), _detached(head.bias))).double()
        for place, value in enumerate((0.0, smoothing)):
            loss = F.cross_entropy(logits, wanted, ignore_index=IGNORED, reduction="sum", label_smoothing=value)
            sums[place] += float(loss)
        sums[2] += float(logits[wanted != IGNORED].logsumexp(-1).square().sum())
    return tuple(sums)


def _detached(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach()


def holds_numbers_of(dtype: torch.dtype, tensors: Sequence[Tensor]) -> bool:
    """Return True if almost all elements of wider `tensors` are numbers of `dtype`; only real ones are asked."""
    elements = [tensor.detach().flatten() for tensor in tensors if tensor.is_floating_point()]
    elements = [value[value != 0] for value in elements]
    equal = sum(int((value.to(dtype).to(value.dtype) == value).sum()) for value in elements)
    return equal > 0.999 * sum(value.numel() for value in elements) > 0
