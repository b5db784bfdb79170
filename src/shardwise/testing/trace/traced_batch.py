"""The microbatch of which every traced rank gets another of the same shapes.

Rows of tokens are as long as the job says, and need no data. How large images are, how long sound and other samples
are, and what a module of one's own is given, the first rows of the job's data say.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.data.batch import Batch
from shardwise.data.file_samples import gives_samples
from shardwise.data.packed_rows import most_completions
from shardwise.data.prepare import prepare
from shardwise.job.tasks import TASKS
from shardwise.model.known_values import KnownValues
from shardwise.plan.normalisation import NORMALISATIONS
from shardwise.plan.plan import Plan
from shardwise.testing.trace.recorder import RankRecorder
from shardwise.training.reference import PRECOMPUTED
from shardwise.training.step import weighted


class TracedBatch(NamedTuple):
    """A microbatch on the host; `is_real` where its values are the data's, so that code may read them."""

    batch: Batch
    is_real: bool

    @contextmanager
    def given(self, recorder: RankRecorder) -> Iterator[None]:
        """Let the traced code read values of batches that `fakes` returns inside, where they are real."""
        if not self.is_real:
            yield
            return
        with KnownValues() as recorder.known:
            yield

    def fakes(self, recorder: RankRecorder) -> Batch:
        """Return another batch of the same shapes, on the host."""

        def fake(tensor: Tensor) -> Tensor:
            made = torch.empty(tensor.shape, dtype=tensor.dtype)
            if recorder.known is not None:
                recorder.known.assume(made, lambda: tensor)
            return made

        return self.batch.mapped(fake)


def traced_batch(plan: Plan) -> TracedBatch:
    """Return what a microbatch of a plan looks like.

    Raises:
        ShardwiseError: the job's data is needed and cannot be read.
    """
    is_real = gives_samples(plan.job) or TASKS[plan.job.model.task].labels == "decoder"
    batch = _first_rows(plan) if is_real else _tokens(plan)
    return TracedBatch(weighted([batch], NORMALISATIONS[plan.normalisation])[0], is_real)


def _first_rows(plan: Plan) -> Batch:
    samples = prepare(plan.job).train
    numbers = [row % len(samples) for row in range(plan.microbatch)]
    return samples.batch(numbers, numbers, 0)


def _tokens(plan: Plan) -> Batch:
    rows, length = plan.microbatch, plan.sequence_length
    tokens = torch.zeros(rows, length, dtype=torch.int64)
    isolated = plan.job.isolates_documents
    return Batch(
        inputs={"input_ids": tokens} | ({"position_ids": tokens} if isolated else {}),
        labels=tokens,
        rows=torch.arange(rows),
        document_ids=tokens if isolated else None,
        is_token=tokens == 0 if plan.job.data.has_rows else None,
        completions=tokens if plan.job.reads_pairs else None,
        reference=torch.zeros(rows, most_completions(length), dtype=torch.float64)
        if plan.reference == PRECOMPUTED
        else None,
    )
