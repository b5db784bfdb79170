"""What a run says at its end, also where the disk is full."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from shardwise.checkpoint.manifest import Progress
from shardwise.errors import OutputError, ShardwiseError
from shardwise.job.schema import Job
from shardwise.observe.display import Display
from shardwise.observe.metrics import MetricsWriter
from shardwise.observe.output_disk import writing
from shardwise.testing.world import WorldPool
from shardwise.training.output import write_run
from shardwise.training.step import StepResult
from shardwise.training.trainer import MOST_SKIPPED, Trainer, train_rank
from tests.parity.jobs import Points, make_module_job


class Holes(Points):
    """Every number is missing in the first half of the samples."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = super().__getitem__(index)
        return {name: value * float("nan") if index < len(self) // 2 else value for name, value in row.items()}


def last_words(job: Job) -> list[str]:
    said: list[str] = []
    Path(job.output).mkdir(parents=True)
    with mock.patch.object(Display, "say", lambda _, text: said.append(text)):
        train_rank(job, torch.device("cpu"))
    return said


def test_steps_that_were_skipped_are_counted_and_a_loss_of_ones_own_has_no_unit(
    world_pool: WorldPool, tmp_path: Path
) -> None:
    job = make_module_job(tmp_path, data={"factory": "tests.training.test_trainer:Holes"})
    job = job.model_copy(update={"output": str(tmp_path / "run")})
    said: list[str] = world_pool.run(1, last_words, job)[0]
    end = said[[line.startswith("skipped") for line in said].index(True) :]
    assert end[0].endswith("4 of 4 steps: loss or gradients were not finite, or no label was counted")
    assert end[1].startswith("validation loss") and "nats" not in end[1]


def test_a_run_without_labels_ends_with_its_reason() -> None:
    session: Any = SimpleNamespace(progress=Progress(skipped_in_a_row=MOST_SKIPPED))
    trainer: Any = SimpleNamespace(session=session)
    for count, says in ((0, "no label is counted; give labels other than -100"), (8, "gradients were not finite")):
        with pytest.raises(ShardwiseError, match=says):
            Trainer.check_skipped(trainer, StepResult(0.0, 0.0, count, max(count, 1), skipped=True, loss_scale=1.0))


FULL = Path("/dev/full")


def train_onto(job: Job, device: Path) -> str:
    """Trains with the metrics on a device that takes nothing, not as the file is closed either."""
    Path(job.output).mkdir(parents=True)
    onto_device = mock.patch.object(
        MetricsWriter, "__init__", lambda self, *_, **__: setattr(self, "_file", device.open("w"))
    )
    with onto_device, pytest.raises(OutputError) as caught:
        train_rank(job, torch.device("cpu"))
    return str(caught.value)


@pytest.mark.skipif(not FULL.exists(), reason="there is no device that is always full here")
def test_a_full_disk_is_the_output_directorys_error(world_pool: WorldPool, tmp_path: Path) -> None:
    job = make_module_job(tmp_path).model_copy(update={"output": str(tmp_path / "run")})
    said = world_pool.run(1, train_onto, job, FULL)[0]
    assert said.startswith(f"output='{tmp_path}/run' cannot be written any more: No space left on device; ")
    claimed = tmp_path / "claimed"
    claimed.mkdir()
    (claimed / "run.json.new").symlink_to(FULL)
    with pytest.raises(OutputError):
        write_run(claimed, {})
    assert not list(claimed.iterdir())  # nothing that would make the directory somebody's


def test_what_a_trackers_server_refuses_is_not_the_disks() -> None:
    with pytest.raises(ConnectionRefusedError), writing(Path("run")):
        raise ConnectionRefusedError(errno.ECONNREFUSED, "refused")
