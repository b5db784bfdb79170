"""What a run says at its end."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from shardwise.config import Job
from shardwise.testing.world import WorldPool
from shardwise.training.recorder import Recorder
from shardwise.training.trainer import train_rank
from tests.parity.jobs import Points, make_module_job


class Holes(Points):
    """Every number is missing in the first half of the samples."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = super().__getitem__(index)
        return {name: value * float("nan") if index < len(self) // 2 else value for name, value in row.items()}


def last_words(job: Job) -> list[str]:
    said: list[str] = []
    Path(job.output).mkdir(parents=True)
    with mock.patch.object(Recorder, "say", lambda _, text: said.append(text)):
        train_rank(job, torch.device("cpu"))
    return said


def test_steps_that_were_skipped_are_counted_and_a_loss_of_ones_own_has_no_unit(
    world_pool: WorldPool, tmp_path: Path
) -> None:
    job = make_module_job(tmp_path, data={"factory": "tests.training.test_trainer:Holes"})
    job = job.model_copy(update={"output": str(tmp_path / "run")})
    said: list[str] = world_pool.run(1, last_words, job)[0]
    end = said[[line.startswith("skipped") for line in said].index(True) :]
    assert end[0].endswith("4 of 4 steps: loss or gradients were not finite")
    assert end[1].startswith("validation loss") and "nats" not in end[1]
