"""Rows and losses with which a user's module is tried for rows that change each other's numbers.

Rows are the first of a data set, or like the example of a session, or random tokens. The loss is what will train the
module: `model.loss`, or the mean loss that its forward returns. Where a loop brings its own, each row's outputs stand
for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise._torch_compat.tracing import tree_leaves
from shardwise.data.batch import Batch
from shardwise.data.token_data import TokenData
from shardwise.errors import DataError, ModelError
from shardwise.job.objects import load_object
from shardwise.job.schema import Job
from shardwise.job.tasks import IGNORED, TASKS
from shardwise.model.facts import ModelFacts
from shardwise.model.probe import POSITIONS
from shardwise.model.row_coupling import ROWS, Call, TrialRows, find_coupling
from shardwise.parallel.own_collectives import defining_files, own_collectives_refused
from shardwise.training.objectives.own_loss import LossFunction, call_loss
from shardwise.training.objectives.own_module import own_loss

Values = Callable[[], Mapping[str, Tensor]]
EVEN_STEPS = 0.7548776662, 0.5698402910  # whose multiples fill a square evenly


def with_row_coupling(
    job: Job,
    module: nn.Module,
    facts: ModelFacts,
    data: TokenData | None,
    values: Values,
    example: Mapping[str, Tensor] | None = None,
) -> ModelFacts:
    """Return the facts of a user's module, and whether rows change each other's numbers in it or in its loss.

    Args:
        data: of `data.factory`, if that is where it is from.
        values: gives weights of the module.
        example: keyword arguments of one forward, where a loop brings the data.
    """
    try:
        batch = _first_rows(data) if data is not None else rows_like(example) if example else _tokens(job, facts)
    except DataError:  # rows of several shapes, which no microbatch can hold
        return facts
    function: LossFunction | None = None if job.model.loss is None else load_object(job.model.loss, "model.loss")
    is_proxy = function is None and (facts.returns_logits or facts.classifies)
    rows = TrialRows(
        len(batch.rows),
        call_arguments(job, taken(batch, [0])),
        partial(_summed, job, batch, function, is_proxy),
    )
    with own_collectives_refused(files=defining_files(module.modules())):  # other ranks need not be in a trial
        coupling = find_coupling(module, rows, bool(facts.probe_failure), values)
    return replace(
        facts,
        couples_rows=coupling.is_coupled,
        coupling_untried=coupling.untried,
        keeps_statistics=coupling.keeps_statistics,
        reads_statistics=coupling.reads_statistics,
        draws_numbers=coupling.draws_numbers,
    )


def call_arguments(job: Job, batch: Batch) -> dict[str, Tensor]:
    """Return what a user's module is called with for a batch; `model.loss` takes the labels itself."""
    takes_labels = job.model.loss is None and not TASKS[job.model.task].classifies
    labels = {"labels": batch.labels} if takes_labels and batch.labels is not None else {}
    return {**batch.arguments(), **labels}


def _first_rows(data: TokenData) -> Batch:
    """Return the first rows of a data set that have labels to be counted, of twice as many."""
    numbers = list(range(min(2 * ROWS, len(data.train))))
    batch = data.train.batch(numbers, numbers, 0)
    return taken(batch, [row for row in numbers if int(taken(batch, [row]).count())][:ROWS])


def rows_like(example: Mapping[str, Tensor]) -> Batch:
    """Return random rows of the shapes of an example's; whole numbers are drawn from its own."""
    generator = torch.Generator().manual_seed(0)

    def drawn(value: Tensor) -> Tensor:
        rows = value.detach().cpu()[torch.arange(ROWS) % len(value)]
        if value.is_floating_point():
            return rows + torch.randn(rows.shape, generator=generator)
        return rows.flatten()[torch.randperm(rows.numel(), generator=generator)].reshape(rows.shape)

    inputs = {name: drawn(value) for name, value in example.items()}
    labels = inputs.pop("labels", None)
    return Batch(inputs=inputs, labels=labels, rows=torch.arange(ROWS))


def _tokens(job: Job, facts: ModelFacts) -> Batch:
    """Return rows of random tokens."""
    length = min(POSITIONS, job.data.sequence_length)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(max(2, facts.vocabulary_size), (ROWS, length), generator=generator)
    labels = torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], IGNORED)], dim=1)
    return Batch(inputs={"input_ids": tokens}, labels=labels, rows=torch.arange(ROWS))


def taken(batch: Batch, rows: Sequence[int]) -> Batch:
    """Return some rows of a batch."""
    numbers = torch.tensor(rows, dtype=torch.int64)
    labels = None if batch.labels is None else batch.labels[numbers]
    inputs = {name: value[numbers] for name, value in batch.inputs.items()}
    lengths = {name: [whole[row] for row in rows] for name, whole in batch.lengths.items()}
    return Batch(inputs=inputs, labels=labels, rows=batch.rows[numbers], lengths=lengths)


def _summed(
    job: Job, batch: Batch, function: LossFunction | None, is_proxy: bool, call: Call, rows: Sequence[int]
) -> Tensor:
    """Return the summed loss of some rows of a batch."""
    own = widened(taken(batch, rows))
    output = call(**call_arguments(job, own))
    if function is not None:
        return call_loss(function, output, own, "model.loss")[0]
    if not is_proxy:
        try:
            return own_loss(output) * own.count()
        except ModelError:  # a loop has a loss of its own
            pass
    return _squared_distances(output, rows)


def widened(batch: Batch) -> Batch:
    """Return a batch whose floats are of the dtype of the trial, which is torch's default inside of it."""

    def wide(value: Tensor) -> Tensor:
        return value.to(torch.get_default_dtype()) if value.is_floating_point() else value.clone()

    inputs = {name: wide(value) for name, value in batch.inputs.items()}
    return replace(batch, inputs=inputs, labels=None if batch.labels is None else wide(batch.labels))


def _squared_distances(output: Any, rows: Sequence[int]) -> Tensor:
    """Return the sum of the squared distances of the rows' outputs to a target for each row, of any scale."""
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    total = torch.zeros(())
    for leaf in (leaf for leaf in leaves if leaf.shape[:1] == (len(rows),)):
        places = torch.arange(leaf[0].numel()).reshape(leaf.shape[1:])
        # Not drawn: that would look like draws of the module's.
        targets = [(EVEN_STEPS[0] * places + EVEN_STEPS[1] * row) % 1 for row in rows]
        total = total + (leaf - torch.stack(targets)).square().sum()
    return total
