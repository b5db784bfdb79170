"""Experiment trackers: TensorBoard, Weights & Biases and MLflow behind one small protocol.

The trainer makes them on rank 0 before training starts, so that a missing extra is an error before any work, and passes
each record of metrics.jsonl to all of them. Names of the scalars are the same everywhere: `train/loss`,
`validation/loss`, `throughput/tokens_per_second`, `memory/rank0_bytes`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from shardwise.errors import ConfigError, MachineError
from shardwise.job.schema import Job
from shardwise.observe.metrics import Record, plain

_SECTIONS = {
    "validation_loss": "validation/loss",
    "tokens_per_second": "throughput/tokens_per_second",
    "tflops_per_rank": "throughput/tflops_per_rank",
    "smp_tflops_per_rank": "throughput/smp_tflops_per_rank",
    "mfu": "throughput/mfu",
    "seconds": "throughput/seconds",
}


class Tracker(Protocol):
    """Where the records of a run go besides metrics.jsonl."""

    def log(self, record: Record) -> None: ...

    def close(self) -> None: ...


def require_extras(job: Job) -> None:
    """Raise ConfigError when a tracker that the job asks for is not installed. Imports nothing: any process may ask."""
    for name, asked in (("wandb", job.observe.wandb), ("mlflow", job.observe.mlflow)):
        if asked and not _installed(name):
            raise ConfigError(
                f"observe.{name}={asked!r} needs the package {name}, which is not installed; "
                f"run `pip install 'shardwise[{name}]'` or unset observe.{name}."
            )


def make_trackers(job: Job, output: Path) -> list[Tracker]:
    """The trackers that the job asks for, opened. Raises ConfigError when one's extra is not installed."""
    require_extras(job)
    observe = job.observe
    trackers: list[Tracker] = [TensorBoardTracker(output / "tensorboard")] if observe.tensorboard else []
    if observe.wandb:
        trackers.append(WandbTracker(job, output))
    if observe.mlflow:
        trackers.append(MlflowTracker(job))
    return trackers


def scalars(record: Record) -> Iterator[tuple[str, float]]:
    """(name, number) pairs of a record, named by section; what is not a finite number is left out."""
    for key, value in plain(record).items():
        if key == "step" or value is None:
            continue
        if key == "peak_memory_bytes":
            yield from (
                (f"memory/rank{rank}_bytes", float(size)) for rank, size in enumerate(value) if size is not None
            )
        elif isinstance(value, int | float):
            yield _SECTIONS.get(key, f"train/{key}"), float(value)


class TensorBoardTracker:
    """Event files for `tensorboard --logdir OUTPUT/tensorboard`."""

    def __init__(self, directory: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        self._writer = SummaryWriter(str(directory))

    def log(self, record: Record) -> None:
        for name, value in scalars(record):
            self._writer.add_scalar(name, value, record.get("step"))

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """A Weights & Biases run; its usual environment variables (WANDB_MODE, WANDB_API_KEY …) hold."""

    def __init__(self, job: Job, output: Path) -> None:
        def start() -> Any:
            wandb = importlib.import_module("wandb")
            return wandb.init(project=job.observe.wandb, dir=str(output), config=_flat(job))

        self._run = _opened("wandb", start)

    def log(self, record: Record) -> None:
        self._run.log(dict(scalars(record)), step=record.get("step"))

    def close(self) -> None:
        self._run.finish()


class MlflowTracker:
    """An MLflow run in the experiment of `observe.mlflow`; MLFLOW_TRACKING_URI holds."""

    def __init__(self, job: Job) -> None:
        def start() -> Any:
            mlflow = importlib.import_module("mlflow")
            mlflow.set_experiment(job.observe.mlflow)
            mlflow.start_run()
            mlflow.log_params(_flat(job))
            return mlflow

        self._mlflow = _opened("mlflow", start)

    def log(self, record: Record) -> None:
        self._mlflow.log_metrics(dict(scalars(record)), step=record.get("step"))

    def close(self) -> None:
        self._mlflow.end_run()


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
    """The job as `section.key` pairs, unset ones left out."""
    flat: dict[str, Any] = {}
    for section, content in job.model_dump(mode="json", exclude_none=True).items():
        for key, value in content.items() if isinstance(content, dict) else [("", content)]:
            flat[f"{section}.{key}".rstrip(".")] = value
    return flat
