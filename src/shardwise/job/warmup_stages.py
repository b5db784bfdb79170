"""Items of `training.batch_size_schedule` and `training.sequence_length_schedule`.

What follows of them is in `plan/step_sizes.py` and `plan/sequence_lengths.py`.
"""

from __future__ import annotations

from pydantic import Field

from shardwise.job.section import Section
from shardwise.job.values import Positive

SCHEDULES = ("batch_size_schedule", "sequence_length_schedule")  # keys of the training section that list such items


class WarmupStage(Section):
    """Steps at the beginning of a run, until it has read so many samples."""

    until_samples: Positive | None = Field(
        default=None,
        strict=True,
        description="Samples of the run with which it is over, those of earlier stages included; the step that reaches "
        "them is its last.",
    )
    until_tokens: Positive | None = Field(
        default=None, strict=True, description="The same in tokens, `data.sequence_length` for each sample."
    )

    def end(self, sequence_length: int) -> int:
        """Return the samples of the run with which it is over."""
        return self.until_samples if self.until_samples is not None else -(-(self.until_tokens or 0) // sequence_length)


class BatchSizeStage(WarmupStage):
    """The size of the steps at the beginning of a run."""

    sequences_per_step: Positive = Field(strict=True, description="Global sequences (samples) of each of its steps.")


class SequenceLengthStage(WarmupStage):
    """The length of the sequences at the beginning of a run."""

    sequence_length: Positive = Field(
        strict=True, description="Tokens of each of its sequences; it divides `data.sequence_length`."
    )
