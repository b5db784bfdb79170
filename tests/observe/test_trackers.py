"""Trackers: TensorBoard for real, the optional ones against stand-ins of their few calls."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from shardwise.errors import ConfigError, MachineError
from shardwise.job.schema import Job
from shardwise.observe.trackers import make_trackers, scalars

RECORD = {
    "step": 3,
    "loss": 2.5,
    "mfu": None,
    "grad_norm": float("nan"),
    "skipped": False,
    "tokens_per_second": 100.0,
    "peak_memory_bytes": [10, 20],
}
NAMED = {
    "train/loss": 2.5,
    "train/skipped": 0.0,
    "throughput/tokens_per_second": 100.0,
    "memory/rank0_bytes": 10.0,
    "memory/rank1_bytes": 20.0,
}


def job(**observe: Any) -> Job:
    return Job.model_validate({"observe": {"tensorboard": False, **observe}})


def test_scalars_are_named_by_section_and_finite() -> None:
    assert dict(scalars(RECORD)) == NAMED
    evaluated = {"step": 3, "validation_loss": 2.0, "validation_accuracy": 0.5, "passes/web": 0.25}
    assert dict(scalars(evaluated)) == {
        "validation/loss": 2.0, "validation/accuracy": 0.5, "train/passes/web": 0.25,
    }  # fmt: skip
    of_sets = {"step": 3, "exact_match": 0.5, "validation_loss/books": 2.5, "exact_match/books": 0.25, "samples": []}
    assert dict(scalars(of_sets)) == {
        "validation/exact_match": 0.5, "validation/books/loss": 2.5, "validation/books/exact_match": 0.25,
    }  # fmt: skip


def test_tensorboard_event_files_hold_the_numbers(tmp_path: Path) -> None:
    (tracker,) = make_trackers(Job(), tmp_path)
    tracker.open()
    tracker.log(RECORD)
    tracker.log({**RECORD, "step": 4, "loss": 2.25})
    tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(3, 2.5), (4, 2.25)]
    assert set(events.Tags()["scalars"]) == set(NAMED)


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_missing_extra_is_named_before_anything_starts(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # import then fails, installed or not
    with pytest.raises(ConfigError, match=rf"observe.{name}='x'.*pip install 'shardwise\[{name}\]'"):
        make_trackers(Job.model_validate({"observe": {name: "x"}}), tmp_path)
    assert list(tmp_path.iterdir()) == []  # not even the TensorBoard directory


class FakeWandb(ModuleType):
    def __init__(self) -> None:
        super().__init__("wandb")
        self.calls: list[Any] = []
        self.id = "r1"
        self.resumed: list[Any] = []

    def init(self, **kwargs: Any) -> FakeWandb:
        self.resumed.append((kwargs.get("id"), kwargs.get("resume")))
        self.calls.append(("init", kwargs["project"], kwargs["config"]["training.steps"]))
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        self.calls.append((step, values))

    def finish(self) -> None:
        self.calls.append("finish")


def test_wandb_gets_job_records_and_finish(tmp_path: Path, monkeypatch: Any) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    tracked = job(wandb="project")
    (tracker,) = make_trackers(tracked, tmp_path)
    tracker.open()
    tracker.log(RECORD)
    tracker.close()
    assert fake.calls == [("init", "project", tracked.training.steps), (3, NAMED), "finish"]


class FakeMlflow(ModuleType):
    def __init__(self) -> None:
        super().__init__("mlflow")
        self.calls: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self._answer(name, args, kwargs)

    def _answer(self, *call: Any) -> Any:
        self.calls.append(call)
        return SimpleNamespace(info=SimpleNamespace(run_id="r1"))


def test_mlflow_gets_job_records_and_end(tmp_path: Path, monkeypatch: Any) -> None:
    fake = FakeMlflow()
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    (tracker,) = make_trackers(job(mlflow="experiment"), tmp_path)
    tracker.open()
    tracker.log(RECORD)
    tracker.close()
    assert [call[0] for call in fake.calls] == ["set_experiment", "start_run", "log_params", "log_metrics", "end_run"]
    assert fake.calls[0][1] == ("experiment",)
    assert fake.calls[2][1][0]["output"] == "shardwise-run"
    assert fake.calls[3][1:] == ((NAMED,), {"step": 3})


def test_a_tracker_that_cannot_start_is_a_named_error(tmp_path: Path, monkeypatch: Any) -> None:
    fake = FakeWandb()
    fake.init = lambda **_: (_ for _ in ()).throw(RuntimeError("no API key"))  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with pytest.raises(MachineError, match=r"observe\.wandb.*no API key"):
        make_trackers(job(wandb="project"), tmp_path)[0].open()


def test_a_resumed_run_goes_on_with_its_curve(tmp_path: Path, monkeypatch: Any) -> None:
    wandb, mlflow = FakeWandb(), FakeMlflow()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    for steps_done in (0, 3):
        for tracker in make_trackers(job(tensorboard=True, wandb="project", mlflow="experiment"), tmp_path):
            tracker.open(steps_done)
            for step in (3, 4):
                if step > steps_done:
                    tracker.log({**RECORD, "step": step, "loss": float(steps_done)})
            tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(3, 0.0), (4, 3.0)]
    assert wandb.resumed == [(None, None), ("r1", "allow")]
    assert [call[2]["run_id"] for call in mlflow.calls if call[0] == "start_run"] == [None, "r1"]
