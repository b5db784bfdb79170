"""The lengths of the sequences that a run trains on, where `training.sequence_length_schedule` lets them grow.

A sample has `data.sequence_length` tokens at every stage, and the first stages cut each into shorter sequences, which
know nothing of each other. So samples, their order, the tokens of a step and the state of the data are those of a run
without the schedule, and the length of a step's sequences is a pure function of the samples before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardwise.job.schema import TrainingSection


@dataclass(frozen=True)
class LengthStage:
    """Sequences of `length` tokens, in the steps that begin with sample `first_sample` or behind it."""

    length: int
    first_sample: int = 0


@dataclass(frozen=True)
class SequenceLengths:
    """The stages of a run in order; the last one has whole samples and no end."""

    stages: tuple[LengthStage, ...]

    @property
    def grow(self) -> bool:
        """True where sequences are not all of one length."""
        return len(self.stages) > 1

    @property
    def lengths(self) -> list[int]:
        """Tokens of a sequence of each stage."""
        return [stage.length for stage in self.stages]

    def after(self, samples: int) -> int:
        """Return the tokens of a sequence in the step that follows `samples` of them."""
        return next(stage.length for stage in reversed(self.stages) if stage.first_sample <= samples)

    def sequences_per_sample(self, samples: int) -> int:
        """Return the sequences into which each sample of the step that follows `samples` of them is cut."""
        return self.stages[-1].length // self.after(samples)


def sequence_lengths(training: TrainingSection, sequence_length: int) -> SequenceLengths:
    """Return the lengths of the sequences of a job whose samples have `sequence_length` tokens."""
    return SequenceLengths(tuple(_stages(training, sequence_length)))


def _stages(training: TrainingSection, sequence_length: int) -> Iterator[LengthStage]:
    """Yield the stages; each begins where the one before ends."""
    sample = 0
    for stage in training.sequence_length_schedule:
        yield LengthStage(stage.sequence_length, sample)
        sample = stage.end(sequence_length)
    yield LengthStage(sequence_length, sample)
