"""The batches of one rank: which samples of which step, as a pure function of the step.

Exact definition. G = sequences_per_step. Step k consumes the samples (counters) c = k*G … k*G + G - 1, or behind its
first sample as many as training.batch_size_schedule gives it in the place of G (`plan/step_sizes.py`); sample c is
index `order(seed, c, len(split))` of the training split, and of a mixture its own sample c. Microbatch m of data rank d
holds the rows i = (m*data_ranks + d)*microbatch + j, 0 <= j < microbatch, of the step; a row i >= G is padding: it
repeats row i % G and counts nowhere. A run of E epochs has E * len(split) samples: its last step holds R <= G of them,
and there rows from R on are padding. Evaluation is the same without shuffling: global batch b holds samples b*G … of
the split, those beyond its end are padding, and the counter of sample s is EVALUATION + s.

Where training.sequence_length_schedule gives the step behind c samples sequences of l < S tokens, each of its rows is
then cut into S / l sequences (`Batch.cut`, `plan/sequence_lengths.py`). Evaluation has whole samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from shardwise.data.batch import Batch, batch_digest
from shardwise.data.mixture import Mixture
from shardwise.data.order import order
from shardwise.data.packing import is_stream
from shardwise.job.tasks import IGNORED
from shardwise.plan.sequence_lengths import SequenceLengths
from shardwise.plan.step_sizes import SizeStage, StepSizes, microbatches_of

Locate = Callable[[int], tuple[int, int]]  # row of a step -> (index in the split, sample counter)

EVALUATION = 1 << 62  # counters of evaluation rows start here, so that no training row shares them


class Split(Protocol):
    """Samples by index: `packing.Windows`, `packed_rows.PackedRows`, `factory.Samples` or `mixture.Mixture`."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def batch(self, indices: Sequence[int], counters: Sequence[int], seed: int) -> Batch:
        """The samples `indices`, with `rows` = counters."""


def is_in_order(split: Split) -> bool:
    """Return whether a split has an order of its own: a mixture, or a stream."""
    return is_stream(split) or isinstance(split, Mixture)


def training_index(split: Split, seed: int, counter: int) -> int:
    """Return the index in its split of the training sample `counter`; a mixture has an order of its own."""
    return counter if is_in_order(split) else order(seed, counter, len(split))


class Stream:
    """One data rank's view of a split."""

    def __init__(
        self,
        split: Split,
        seed: int,
        sequences_per_step: int,
        microbatch: int,
        accumulation: int,
        data_ranks: int,
        data_rank: int,
        device: torch.device | str = "cpu",
        total: int | None = None,
        sizes: StepSizes | None = None,
        lengths: SequenceLengths | None = None,
    ) -> None:
        if not 0 <= data_rank < data_ranks:
            raise ValueError(f"data_rank={data_rank} of {data_ranks}")
        if microbatch * accumulation * data_ranks < sequences_per_step:
            raise ValueError(f"{microbatch=} x {accumulation=} x {data_ranks=} is less than {sequences_per_step=}")
        self.split = split
        self.seed = seed
        self.sequences_per_step = sequences_per_step
        self.microbatch = microbatch
        self.accumulation = accumulation
        self.data_ranks = data_ranks
        self.data_rank = data_rank
        self.device = device
        self.total = total  # samples of the whole run, where it ends with an epoch; the last step may be ragged
        self.sizes = sizes or StepSizes((SizeStage(sequences_per_step),))  # of steps, of which G is the last
        self.lengths = lengths  # of sequences; None: samples are whole

    def batches(self, step: int) -> list[Batch]:
        """The microbatches of this rank in one step of training."""
        return self.batches_from(self.sizes.samples_before(step))

    def batches_from(self, consumed: int) -> list[Batch]:
        """The same for the step that follows `consumed` samples, whatever the steps before it looked like."""
        real, cuts = self.samples_after(consumed), self.lengths.sequences_per_sample(consumed) if self.lengths else 1

        def locate(row: int) -> tuple[int, int]:
            return training_index(self.split, self.seed, consumed + row), consumed + row

        numbers = range(self._accumulation_after(consumed))
        return [self._microbatch(number, real, locate).cut(cuts) for number in numbers]

    def _accumulation_after(self, consumed: int) -> int:
        """Return this rank's microbatches of the step that follows `consumed` samples; `accumulation` of one of G."""
        size = self.sizes.after(consumed)
        is_whole = size == self.sequences_per_step
        return self.accumulation if is_whole else microbatches_of(size, self.microbatch, self.data_ranks)

    def samples_after(self, consumed: int) -> int:
        """Return the samples of the step that follows `consumed` ones: its size, or what the last epoch has left."""
        size = self.sizes.after(consumed)
        left = size if self.total is None else self.total - consumed
        if left < 1:
            raise ValueError(f"{consumed} of {self.total} samples are consumed; no step is left")
        return min(left, size)

    def evaluation(self, split: Split | None = None, batches: int | None = None) -> Iterator[list[Batch]]:
        """Global batches of `split` (unset: this stream's) in order, at most `batches`; the last one may be ragged.

        Each item holds this rank's `accumulation` microbatches; every rank gets the same number of items.
        """
        source = self.split if split is None else split
        for number in range(self.evaluation_batches(source, batches)):
            start = number * self.sequences_per_step
            real = min(self.sequences_per_step, len(source) - start)

            def locate(row: int, start: int = start) -> tuple[int, int]:
                return start + row, EVALUATION + start + row

            yield [self._microbatch(index, real, locate, source) for index in range(self.accumulation)]

    def evaluation_batches(self, split: Split, batches: int | None = None) -> int:
        """Return the number of items that `evaluation` gives."""
        whole = -(-len(split) // self.sequences_per_step)
        return whole if batches is None else min(batches, whole)

    def _microbatch(self, number: int, real: int, locate: Locate, split: Split | None = None) -> Batch:
        """Microbatch `number` of a step with `real` rows; `locate` gives (index, counter) of a row."""
        first = (number * self.data_ranks + self.data_rank) * self.microbatch
        rows = range(first, first + self.microbatch)
        located = [locate(row % real) for row in rows]
        source = self.split if split is None else split
        batch = source.batch([index for index, _ in located], [counter for _, counter in located], self.seed)
        batch.counted = torch.tensor([row < real for row in rows])
        if batch.labels is not None and batch.labels.dtype.is_signed and rows.stop > real:
            batch.labels[~batch.counted] = IGNORED
        batch.digest = batch_digest(batch)
        return batch if torch.device(self.device).type == "cpu" else batch.to(self.device)
