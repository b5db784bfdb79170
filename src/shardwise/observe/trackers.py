"""Experiment trackers: TensorBoard, Weights & Biases and MLflow as callbacks with one small base.

They run on rank 0 and are opened before the first step. Each takes every record of metrics.jsonl. Names of the scalars
are the same everywhere: `train/loss`, `validation/loss`, `throughput/tokens_per_second`, `memory/rank0_bytes`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError, MachineError
from shardwise.job.schema import Job
from shardwise.observe.callback import Callback, ObservedSession, reported
from shardwise.observe.metrics import Record, plain
from shardwise.observe.output_disk import writing

_SECTIONS = {
    "tokens_per_second": "throughput/tokens_per_second",
    "tflops_per_rank": "throughput/tflops_per_rank",
    "smp_tflops_per_rank": "throughput/smp_tflops_per_rank",
    "mfu": "throughput/mfu",
    "seconds": "throughput/seconds",
}


class Tracker(Callback):
    """A place besides metrics.jsonl where the records of a run go; subclasses open it, log to it and close it."""

    rank_zero_only = True
    name = ""  # of its key in the section observe

    def __init__(self, output: Path) -> None:
        self._output = output

    def open(self, steps_done: int = 0) -> None:
        """Reach the tracker; a run that has been resumed after `steps_done` goes on with its curve."""
        raise NotImplementedError

    def log(self, record: Record) -> None:
        """Take the numbers of a record."""
        raise NotImplementedError

    def close(self) -> None:
        """Finish; also where it has not been opened."""
        raise NotImplementedError

    def on_start(self, session: ObservedSession) -> None:
        """Open the tracker."""
        with writing(self._output):
            self.open(session.steps_done)

    def on_step_end(self, session: ObservedSession, record: Record) -> None:
        """Log a step."""
        self._keep(record)

    def on_evaluation(self, session: ObservedSession, record: Record) -> None:
        """Log an evaluation."""
        self._keep(record)

    def on_note(self, session: ObservedSession, text: str, record: Record | None) -> None:
        """Log what the note is about."""
        if record is not None:
            self._keep(record)

    def on_end(self, session: ObservedSession, result: Record) -> None:
        """Close the tracker. A server that is gone by then takes nothing away from the run."""
        with reported(session, f"observe.{self.name}: the tracker could not be closed"), writing(self._output):
            self.close()

    def on_failure(self, session: ObservedSession, error: BaseException) -> None:
        """Close the tracker with what it has."""
        with writing(self._output):
            self.close()

    def _keep(self, record: Record) -> None:
        with writing(self._output):
            self.log(record)


def require_extras(job: Job) -> None:
    """Raise ConfigError when a tracker that the job asks for is not installed. Imports nothing: any process may ask."""
    for name, asked in (("wandb", job.observe.wandb), ("mlflow", job.observe.mlflow)):
        if asked and not _installed(name):
            raise ConfigError(
                f"observe.{name}={asked!r} needs the package {name}, which is not installed; "
                f"run `pip install 'shardwise[{name}]'` or unset observe.{name}."
            )


def make_trackers(job: Job, output: Path) -> list[Tracker]:
    """Return the trackers that the job asks for. Raises ConfigError when one's extra is not installed."""
    require_extras(job)
    observe = job.observe
    trackers: list[Tracker] = [TensorBoardTracker(output)] if observe.tensorboard else []
    if observe.wandb:
        trackers.append(WandbTracker(job, output))
    if observe.mlflow:
        trackers.append(MlflowTracker(job, output))
    return trackers


def scalars(record: Record) -> Iterator[tuple[str, float]]:
    """Yield (name, number) pairs of a record, named by section; what is not a finite number is left out."""
    for key, value in plain(record).items():
        if key == "step" or value is None:
            continue
        if key == "peak_memory_bytes":
            yield from (
                (f"memory/rank{rank}_bytes", float(size)) for rank, size in enumerate(value) if size is not None
            )
        elif isinstance(value, int | float):
            yield _SECTIONS.get(key) or _section_of(key), float(value)


def _section_of(key: str) -> str:
    """Return the name of a scalar that has none of its own: `validation_loss/NAME` is `validation/NAME/loss`."""
    metric, _, name = key.partition("/")
    if not metric.startswith(("validation_", "exact_match")):
        return f"train/{key}"
    label = metric.removeprefix("validation_")
    return f"validation/{name}/{label}" if name else f"validation/{label}"


class TensorBoardTracker(Tracker):
    """Event files for `tensorboard --logdir OUTPUT/tensorboard`."""

    name = "tensorboard"

    def __init__(self, output: Path) -> None:
        super().__init__(output)
        self._writer: Any = None

    def open(self, steps_done: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        # Steps behind the checkpoint that were logged before the run broke off are not shown twice.
        purge = steps_done + 1 if steps_done else None
        self._writer = SummaryWriter(str(self._output / "tensorboard"), purge_step=purge)

    def log(self, record: Record) -> None:
        for name, value in scalars(record):
            self._writer.add_scalar(name, value, record.get("step"))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WandbTracker(Tracker):
    """A Weights & Biases run; its usual environment variables (WANDB_MODE, WANDB_API_KEY …) hold."""

    name = "wandb"

    def __init__(self, job: Job, output: Path) -> None:
        super().__init__(output)
        self._job = job
        self._run: Any = None

    def open(self, steps_done: int = 0) -> None:
        known = _known_run(self._output, "wandb", steps_done)
        resumed = {"id": known, "resume": "allow"} if known else {}

        def start() -> Any:
            wandb = importlib.import_module("wandb")
            where = {"project": self._job.observe.wandb, "dir": str(self._output)}
            return wandb.init(**where, config=_flat(self._job), **resumed)

        self._run = _opened("wandb", start)
        _keep_run(self._output, "wandb", self._run.id)

    def log(self, record: Record) -> None:
        self._run.log(dict(scalars(record)), step=record.get("step"))

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


class MlflowTracker(Tracker):
    """An MLflow run in the experiment of `observe.mlflow`; MLFLOW_TRACKING_URI holds."""

    name = "mlflow"

    def __init__(self, job: Job, output: Path) -> None:
        super().__init__(output)
        self._job = job
        self._mlflow: Any = None

    def open(self, steps_done: int = 0) -> None:
        known = _known_run(self._output, "mlflow", steps_done)

        def start() -> tuple[Any, str]:
            mlflow = importlib.import_module("mlflow")
            mlflow.set_experiment(self._job.observe.mlflow)
            run = mlflow.start_run(run_id=known)
            if known is None:  # parameters cannot be logged with other values
                mlflow.log_params(_flat(self._job))
            return mlflow, run.info.run_id

        self._mlflow, name = _opened("mlflow", start)
        _keep_run(self._output, "mlflow", name)

    def log(self, record: Record) -> None:
        self._mlflow.log_metrics(dict(scalars(record)), step=record.get("step"))

    def close(self) -> None:
        if self._mlflow is not None:
            self._mlflow.end_run()


def _known_run(output: Path, tracker: str, steps_done: int) -> str | None:
    """Return the tracker's own name of the run that is being resumed; None where it starts, or is not known there."""
    file = output / f"{tracker}_run.txt"
    return file.read_text(encoding="utf-8").strip() if steps_done and file.exists() else None


def _keep_run(output: Path, tracker: str, name: str) -> None:
    (output / f"{tracker}_run.txt").write_text(f"{name}\n", encoding="utf-8")


def _installed(name: str) -> bool:
    if name in sys.modules:
        return sys.modules[name] is not None
    return importlib.util.find_spec(name) is not None


def _opened(name: str, start: Callable[[], Any]) -> Any:
    """Open a tracker; whatever its service or credentials refuse is the user's to fix, so it gets a name."""
    try:
        return start()
    except Exception as error:
        raise MachineError(
            f"observe.{name}: the tracker could not start ({type(error).__name__}: {error}); "
            f"check its credentials and network, or unset observe.{name}."
        ) from error


def _flat(job: Job) -> dict[str, Any]:
    """Return the job as `section.key` pairs, unset ones left out."""
    flat: dict[str, Any] = {}
    for section, content in job.model_dump(mode="json", exclude_none=True).items():
        for key, value in content.items() if isinstance(content, dict) else [("", content)]:
            flat[f"{section}.{key}".rstrip(".")] = value
    return flat
