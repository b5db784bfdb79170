"""What a run says of itself beforehand, and what it says when its memory is not enough."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from shardwise.errors import CapacityError
from shardwise.job.schema import Job
from shardwise.observe.report import write_report
from shardwise.plan.step_sizes import SizeStage, StepSizes
from shardwise.planner.formulas.local import (
    MachineConstants,
    constants_path,
    cpu_cluster,
    keep_constants,
    machine_constants,
)
from shardwise.testing.world import WorldPool
from shardwise.training import session
from shardwise.training.forecast import WATCHED, Forecast, ForecastReport, compared
from shardwise.training.output import claim_output
from shardwise.training.trainer import train_rank
from tests.parity.jobs import tensor_job

MEASURED = MachineConstants({1: 0.05, 2: 0.03}, {1: 10.0, 2: 6.0}, 2.0, 1e-4, {1: 2.0, 2: 3.0}, 1e7, "a test")


def job_in(corpora: Path, output: Path, steps: int) -> Job:
    job = tensor_job(corpora, "llama", training={"steps": steps}, observe={"tensorboard": False, "sample": False})
    return job.model_copy(update={"output": str(output)})


def train(job: Job, cache: str) -> None:
    with mock.patch.dict("os.environ", {"XDG_CACHE_HOME": cache}), claim_output(job):
        keep_constants(MEASURED)
        train_rank(job, torch.device("cpu"))


def run_dry_of_memory(job: Job, cache: str) -> str:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    with mock.patch.object(session, "train_step", fails), pytest.raises(CapacityError) as raised:
        train(job, cache)
    return str(raised.value)


def test_prediction_and_measurement_are_recorded(world_pool: WorldPool, corpora: Path, tmp_path: Path) -> None:
    job = job_in(corpora, tmp_path / "run", WATCHED + 2)
    world_pool.run(1, train, job, str(tmp_path / "cache"))
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (record,) = [record for record in records if "predicted_step_seconds" in record]
    assert record["step"] == WATCHED
    steps = {each["step"]: each for each in records if "loss" in each}
    assert record["measured_peak_memory_bytes"] == steps[WATCHED]["peak_memory_bytes"][0]
    assert 0 < record["measured_step_seconds"] <= max(each["seconds"] for each in steps.values())
    expected = json.loads((tmp_path / "run" / "run.json").read_text())["prediction"]
    assert expected["step_seconds"] == record["predicted_step_seconds"] > 0
    assert expected["peak_memory_bytes"] == record["predicted_peak_memory_bytes"]
    page = write_report(tmp_path / "run").read_text()
    assert "Predicted step" in page and "; predicted " in page


def test_running_out_of_memory_names_causes_and_remedies(world_pool: WorldPool, corpora: Path, tmp_path: Path) -> None:
    (said,) = world_pool.run(1, run_dry_of_memory, job_in(corpora, tmp_path / "run", 2), str(tmp_path / "cache"))
    assert said.startswith("out of memory: CUDA out of memory. Tried to allocate 2.00 GiB")
    for part in ("predicted at the", "held: parameters", "would fit, cheapest first", "step time"):
        assert part in said, part
    assert said.count("GiB, step time") == 3 or "no change of one or two keys" in said


def test_the_comparison_is_of_the_median_without_the_first_step() -> None:
    forecast = Forecast.__new__(Forecast)
    forecast.__init__(memory=mock.Mock(total=900.0), seconds=2.0, interval=(1.0, 3.0), resident=100)  # type: ignore[misc]
    made = [forecast.watch({"step": n, "seconds": 50.0 if n == 1 else 1.0, "peak_memory_bytes": [None, 7, 800]})
            for n in range(1, WATCHED + 2)]  # fmt: skip
    assert [each is not None for each in made].index(True) == WATCHED - 1 and made.count(None) == WATCHED
    record = made[WATCHED - 1]
    assert record is not None
    assert record["measured_step_seconds"] == 1.0 and record["measured_peak_memory_bytes"] == 800
    assert "2 s predicted (+100.0%)" in compared(record) and "(+25.0%)" in compared(record)


def test_steps_that_are_smaller_than_the_predicted_one_are_not_compared() -> None:
    sizes = StepSizes((SizeStage(4), SizeStage(8, 2, 8)))
    plan = mock.Mock(sequences_per_step=8, step_sizes=sizes, sequence_length=16)
    report = ForecastReport(mock.Mock(plan=plan), mock.Mock())
    report._forecast = mock.Mock(watch=mock.Mock(return_value=None))
    for step in (1, 2, 3):
        report.on_step_end(mock.Mock(rank=0), {"step": step})
    report.on_step_end(mock.Mock(rank=0), {"step": 4, "sequence_length": 8})
    report._forecast.watch.assert_called_once_with({"step": 3})


def test_measured_constants_are_read_back_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert machine_constants() is None
    keep_constants(MEASURED)
    assert machine_constants() == MEASURED
    assert cpu_cluster(2).accelerator.fp32 == 0.03 and cpu_cluster(2).intra == 2.0
    assert cpu_cluster(8).accelerator.fp32 == 0.03 * 2 / 8  # eight share what the nearest that was measured does
    constants_path().write_text('{"tflops": 3}')
    assert machine_constants() is None
