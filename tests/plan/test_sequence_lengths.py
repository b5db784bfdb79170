"""Lengths of sequences: what a step trains on is that of a run which is counted sample by sample."""

from __future__ import annotations

import random

from shardwise.job.schema import TrainingSection
from shardwise.job.warmup_stages import SequenceLengthStage
from shardwise.plan.sequence_lengths import sequence_lengths
from shardwise.words import divisors


def test_lengths_are_those_of_a_run_that_is_counted() -> None:
    draw = random.Random(38)
    for _ in range(100):
        lengths = [*sorted(draw.sample(divisors(720)[:-1], draw.randrange(1, 6))), 720]
        ends = sorted(draw.sample(range(1, 100), len(lengths) - 1))
        stages = [
            SequenceLengthStage(sequence_length=length, until_tokens=720 * end - draw.randrange(720))
            if draw.random() < 0.5
            else SequenceLengthStage(sequence_length=length, until_samples=end)
            for length, end in zip(lengths, ends)
        ]
        planned = sequence_lengths(TrainingSection(sequence_length_schedule=stages), 720)
        for read in range(120):
            length = next((length for length, end in zip(lengths, ends) if read < end), 720)
            assert (planned.after(read), planned.sequences_per_sample(read)) == (length, 720 // length)
    assert not sequence_lengths(TrainingSection(), 720).grow
