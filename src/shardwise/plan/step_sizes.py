"""The sizes of a run's steps: how many sequences each takes, where `training.batch_size_schedule` lets them grow.

The state of the data is counted in samples. So the size of a step is a pure function of the samples before it, and
which samples a step reads is one of its number: on any layout, and after a resume.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardwise.job.schema import TrainingSection


@dataclass(frozen=True)
class SizeStage:
    """Steps of one size: `sequences` each, from `first_step` on, which begins with sample `first_sample`."""

    sequences: int
    first_step: int = 0
    first_sample: int = 0


@dataclass(frozen=True)
class StepSizes:
    """The stages of a run in order; the last one has no end."""

    stages: tuple[SizeStage, ...]

    @property
    def grow(self) -> bool:
        """True where steps are not all of one size."""
        return len(self.stages) > 1

    @property
    def sizes(self) -> list[int]:
        """Sequences of a step of each stage."""
        return [stage.sequences for stage in self.stages]

    def after(self, samples: int) -> int:
        """Return the sequences of the step that follows `samples` of them."""
        return self._stage_at(samples).sequences

    def of(self, step: int) -> int:
        """Return the sequences of a step."""
        return self._stage_of(step).sequences

    def samples_before(self, step: int) -> int:
        """Return the samples that the steps before `step` take."""
        stage = self._stage_of(step)
        return stage.first_sample + (step - stage.first_step) * stage.sequences

    def steps_for(self, samples: int) -> int:
        """Return the steps that take `samples`, of which the last may be left with fewer than its size."""
        stage = self._stage_at(max(samples - 1, 0))
        return stage.first_step + -(-(samples - stage.first_sample) // stage.sequences)

    def steps_between(self, samples: int, total: int) -> int:
        """Return the steps that take what is left of `total` behind `samples`, read in steps of whatever sizes."""
        last, steps = self.stages[-1], 0
        while samples < min(total, last.first_sample):
            samples, steps = samples + self.after(samples), steps + 1
        return steps + -(-max(0, total - samples) // last.sequences)

    def _stage_at(self, samples: int) -> SizeStage:
        return next(stage for stage in reversed(self.stages) if stage.first_sample <= samples)

    def _stage_of(self, step: int) -> SizeStage:
        return next(stage for stage in reversed(self.stages) if stage.first_step <= step)


def microbatches_of(sequences: int, microbatch: int, data_ranks: int) -> int:
    """Return the microbatches that each rank needs for a step of so many sequences."""
    return -(-sequences // (microbatch * data_ranks))


def step_sizes(training: TrainingSection, sequence_length: int, sequences: int) -> StepSizes:
    """Return the sizes of the steps of a job whose last ones take `sequences`."""
    return StepSizes(tuple(_stages(training, sequence_length, sequences)))


def _stages(training: TrainingSection, sequence_length: int, sequences: int) -> Iterator[SizeStage]:
    """Yield the stages; each ends with the first step that reaches its end."""
    step = sample = 0
    for stage in training.batch_size_schedule:
        yield SizeStage(stage.sequences_per_step, step, sample)
        steps = max(0, -(-(stage.end(sequence_length) - sample) // stage.sequences_per_step))
        step, sample = step + steps, sample + steps * stage.sequences_per_step
    yield SizeStage(sequences, step, sample)
