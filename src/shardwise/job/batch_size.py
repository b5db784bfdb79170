"""An item of `training.batch_size_schedule`; what follows of the items is in `plan/step_sizes.py`."""

from __future__ import annotations

from pydantic import Field

from shardwise.job.section import Section
from shardwise.job.values import Positive


class BatchSizeStage(Section):
    """The size of the steps at the beginning of a run, until it has read so many samples."""

    sequences_per_step: Positive = Field(strict=True, description="Global sequences (samples) of each of its steps.")
    until_samples: Positive | None = Field(
        default=None,
        strict=True,
        description="Samples of the run with which it is over, those of earlier stages included; the step that reaches "
        "them is its last.",
    )
    until_tokens: Positive | None = Field(
        default=None, strict=True, description="The same in tokens, `data.sequence_length` for each sample."
    )
