"""Microbatches and loss functions of a loop of one's own, as the step takes them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from shardwise.data.batch import Batch, one_ahead
from shardwise.errors import ConfigError
from shardwise.job.tasks import IGNORED
from shardwise.model.class_loss import NEXT, OTHER
from shardwise.parallel.context import ContextParallel
from shardwise.parallel.objective import Objective
from shardwise.training.loss_trial import LossTrials
from shardwise.training.objectives.language_modelling import LanguageModelling
from shardwise.training.objectives.own_loss import LossFunction, OwnLoss, head_in_forward
from shardwise.training.objectives.own_module import OwnModule
from shardwise.training.setup import AssembledJob

Microbatch = Batch | Mapping[str, Tensor]


def as_batches(
    given: Microbatch | Iterable[Microbatch], assembled: AssembledJob, samples: int, has_own_loss: bool
) -> list[Batch]:
    """Return batches of what a loop brings; mappings hold keyword arguments of the model, and `labels`.

    Labels of a causal language model of transformers stand, as there, at their own token's position.

    Args:
        samples: counter of the step's first row over all ranks, on which dropout depends. Where microbatches may be of
            any size, the step finds out how many rows are ahead of each.
        has_own_loss: whether the loss is the job's, which for language models needs labels.

    Raises:
        ConfigError: there are none, or no labels, or no loss on the last stage, or a pipeline gets another number of
            rows than it was planned for.
    """
    microbatches = [given] if isinstance(given, Batch | Mapping) else list(given)
    if not microbatches:
        raise ConfigError("step() got no microbatch; every rank brings at least one, and all equally many")
    if has_own_loss:
        _check_has_loss(assembled)
    rank, ranks = assembled.layout.data_rank, assembled.layout.data_ranks
    has_one_size = _has_one_size(assembled, len(microbatches))
    batches = []
    for number, microbatch in enumerate(microbatches):
        batch = microbatch if isinstance(microbatch, Batch) else _as_batch(microbatch, assembled)
        if not isinstance(microbatch, Batch):
            first = samples + (number * ranks + rank) * len(batch.rows)
            batch.rows += first
            batch.is_numbered = has_one_size
        if has_own_loss and isinstance(assembled.objective, LanguageModelling):
            if batch.labels is None:
                raise ConfigError("a microbatch has no labels, of which the job takes its loss; give `labels` [B, S]")
            if not isinstance(microbatch, Batch):  # whose labels are aligned, and of tokens
                _check_labels(batch.labels, assembled)
        _check_rows(batch, assembled, len(microbatches))
        if assembled.model.context is not None and batch.document_ids is None:
            _check_sequences(batch, assembled.model.context, assembled.given_labels == NEXT)
        batches.append(batch)
    return batches


def _as_batch(tensors: Mapping[str, Tensor], assembled: AssembledJob) -> Batch:
    if not isinstance(tensors, Mapping) or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise ConfigError(f"a microbatch is a {type(tensors).__name__}; give a mapping of tensors, or a Batch")
    inputs = {name: value for name, value in tensors.items() if name != "labels"}
    if not inputs:
        raise ConfigError("a microbatch has no tensor beside its labels; give the model's keyword arguments by name")
    labels = tensors.get("labels")
    if labels is not None and assembled.given_labels == NEXT:
        labels = one_ahead(labels)
    # An input may be a table that all rows share.
    counted = next((value for value in (labels, *inputs.values()) if value is not None and value.dim()), None)
    if counted is None:
        raise ConfigError("a microbatch has no tensor with a dim, of which dim 0 are its rows; give inputs as [B, ...]")
    return Batch(inputs=inputs, labels=labels, rows=torch.arange(len(counted), device=counted.device))


def _check_has_loss(assembled: AssembledJob) -> None:
    """Refuse to take the loss of a module's own forward on stages, of which no one runs all of it."""
    objective = assembled.objective
    if assembled.plan.stages and isinstance(objective, OwnModule) and objective.function is None:
        raise ConfigError(
            "the loss of a module is taken on the last pipeline stage, from its output; give step() and evaluate() a "
            "loss_function, or set model.loss"
        )


def _check_labels(labels: Tensor, assembled: AssembledJob) -> None:
    """Refuse labels of which the job cannot take its loss, or of which the model's class takes another."""
    way_out = "give step() and evaluate() a loss_function"
    if labels.is_floating_point():
        raise ConfigError(
            f"a microbatch has labels of {labels.dtype}, and the job's loss is that of whole numbers; {way_out}"
        )
    if assembled.given_labels == OTHER:
        raise ConfigError(
            f"the loss of {type(assembled.model.module).__name__} is no mean cross-entropy of its logits, which a "
            f"step takes; {way_out}"
        )


def _has_one_size(assembled: AssembledJob, number: int) -> bool:
    """Return whether `_check_rows` lets microbatches be of one size alone."""
    is_shared = number * assembled.layout.data_ranks > 1
    return bool(assembled.plan.stages) or not is_shared or assembled.facts.rows_together


def _check_rows(batch: Batch, assembled: AssembledJob, number: int) -> None:
    planned = assembled.plan.microbatch * batch.sequences_per_sample
    if not _has_one_size(assembled, number) or len(batch.rows) == planned:
        return
    is_shared = number * assembled.layout.data_ranks > 1
    if is_shared and assembled.facts.rows_together:
        raise ConfigError(
            f"a microbatch has {len(batch.rows)} rows and training.microbatch_size={planned}: rows of "
            f"{assembled.facts.definition or assembled.facts.family} change each other's numbers, and a layout may not "
            f"say which are together; bring {planned} on every layout, or set training.microbatch_size"
        )
    if assembled.plan.stages:
        raise ConfigError(
            f"a microbatch has {len(batch.rows)} rows and the pipeline was planned for training.microbatch_size="
            f"{planned}; stages exchange activations of one size"
        )


def _check_sequences(batch: Batch, context: ContextParallel, causal: bool) -> None:
    """Refuse what ranks that share sequences would not see of them."""
    ids, mask, labels = batch.inputs.get("input_ids"), batch.inputs.get("attention_mask"), batch.labels
    way_out = f"or use parallel.context_parallel_degree 1 in the place of {context.degree}"
    if ids is None or labels is None:
        raise ConfigError(
            f"a microbatch has no {'labels' if ids is not None else 'input_ids'}, and ranks share their sequences; "
            f"bring both, {way_out}"
        )
    if context.forward is not None:  # the model sees all else whole
        return
    for name, value in (*batch.inputs.items(), ("labels", labels)):
        if value.shape[1:2] != ids.shape[1:2]:
            raise ConfigError(
                f"a microbatch has input_ids of the shape {list(ids.shape)} and {name} of {list(value.shape)}, and "
                f"ranks share dim 1 of all tensors; bring [B, {ids.shape[1]}, ...], {way_out}"
            )
    if mask is not None and not _hides_no_more_than_ends(mask != 0, labels, causal):
        ends = "only hide the end of a row, with labels of -100 there" if causal else "hide nothing"
        raise ConfigError(
            "the attention_mask of a microbatch hides tokens from others, and ranks that share sequences make masks of "
            f"their own; let it {ends}, {way_out}"
        )
    positions = batch.inputs.get("position_ids")
    if causal and mask is None and positions is not None and bool((positions.diff(dim=1) != 1).any()):
        raise ConfigError(
            "position_ids of a microbatch do not count up, by which transformers tells documents apart, and ranks that "
            f"share sequences do not; add an attention_mask of ones if they are one document each, {way_out}"
        )


def _hides_no_more_than_ends(mask: Tensor, labels: Tensor, causal: bool) -> bool:
    """Return whether what a mask [B, S] hides is seen by no counted label's position, whether it is hidden or not."""
    if not causal:
        return bool(mask.all())
    starts_anew = mask[:, 1:] & ~mask[:, :-1]
    return not bool(starts_anew.any()) and not bool((~mask & (labels != IGNORED)).any())


@contextmanager
def objective_for(
    assembled: AssembledJob, loss_function: LossFunction | None, trials: LossTrials | None = None
) -> Iterator[Objective]:
    """Yield the objective of a step: the job's own, or one with the caller's loss, which sees logits whole.

    Args:
        trials: try the caller's loss, where the layout may say which rows are together.
    """
    if loss_function is None:
        yield assembled.objective
        return
    what = f"loss_function={getattr(loss_function, '__name__', type(loss_function).__name__)}"
    objective = assembled.objective
    if isinstance(objective, OwnModule):
        # Labels are the loss's, not the forward's.
        objective = OwnModule(loss_function, assembled.model.compute_dtype, objective.cast_arguments)
    with head_in_forward(assembled.model):
        check = None if trials is None else partial(trials.check, assembled.plan, loss_function, what)
        yield OwnLoss(objective, loss_function, what, check)
