"""Sizes of steps: what a step reads is that of a run which is counted sample by sample."""

from __future__ import annotations

import random

from shardwise.job.schema import TrainingSection
from shardwise.job.warmup_stages import BatchSizeStage
from shardwise.plan.step_sizes import step_sizes


def test_steps_are_those_of_a_run_that_is_counted() -> None:
    draw = random.Random(38)
    for _ in range(200):
        sizes = sorted(draw.sample(range(1, 40), draw.randrange(1, 6)))
        ends = sorted(draw.sample(range(1, 300), len(sizes) - 1))
        stages = [
            BatchSizeStage(sequences_per_step=size, until_tokens=7 * end)
            if draw.random() < 0.5
            else BatchSizeStage(sequences_per_step=size, until_samples=end)
            for size, end in zip(sizes, ends)
        ]
        planned, read = step_sizes(TrainingSection(batch_size_schedule=stages), 7, sizes[-1]), 0
        for step in range(60):
            size = next((size for size, end in zip(sizes, ends) if read < end), sizes[-1])
            assert (planned.of(step), planned.after(read), planned.samples_before(step)) == (size, size, read)
            assert planned.steps_for(read + 1) == planned.steps_for(read + size) == step + 1
            assert planned.steps_between(read, 900) == planned.steps_for(900) - step
            read += size
            if read >= 900:
                break


def test_steps_behind_a_ragged_one_are_counted_from_its_samples() -> None:
    assert step_sizes(TrainingSection(), 7, 16).steps_between(17, 34) == 2
