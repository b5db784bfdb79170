"""metrics.jsonl: one JSON object a line, one line a step or evaluation, flushed as it is written.

A record of a step has the keys step, loss, grad_norm, learning_rate, tokens, tokens_per_second, tflops_per_rank,
smp_tflops_per_rank, mfu, peak_memory_bytes and data_seconds (lists by rank), on a CPU compute_seconds and
communication_seconds likewise, skipped, data_hash, seconds, for fp16 loss_scale, where `training.batch_size_schedule`
changes it the step's sequences, with `training.sequence_length_schedule` their sequence_length, and for a mixture of
experts expert_load (the most used expert's rows over the mean), idle_experts (the share without a row) and
balancing_loss, where there is one, for each of `data.sources` passes/NAME, how often it has been read, and for a stream
stream_tokens_per_second (made ahead on rank 0's host), stream_waited_seconds (so far, of several sources also as
stream_waited_seconds/NAME) and stream_skipped_shards. An evaluation has step, validation_loss, validation_loss/NAME of
each of `evaluation.sets` and `data.sources`, and training_loss. One record compares predicted_step_seconds and
predicted_peak_memory_bytes with measured_step_seconds and measured_peak_memory_bytes. One names a straggler. JSON has
no NaN or infinity: such a number becomes null.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from shardwise.errors import UserCodeError

Record = dict[str, Any]


class MetricsWriter:
    """Appends records to a file. With `resume_step`, what a stopped run wrote after that step is dropped first."""

    def __init__(self, path: Path, resume_step: int | None = None) -> None:
        if resume_step is not None and path.exists():
            _keep(path, lambda record: record.get("step", 0) <= resume_step)
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Record) -> None:
        """Append one record; it is on disk (in the page cache) when this returns.

        Raises:
            UserCodeError: a callback has added what JSON cannot hold.
        """
        self._file.write("{" + ", ".join(_pair(key, value) for key, value in plain(record).items()) + "}\n")
        self._file.flush()

    def drop_evaluation(self, step: int) -> None:
        """Drop the record of an evaluation after `step` steps, which is made once more."""
        self._file.close()
        _keep(self._path, lambda record: record.get("step") != step or "validation_loss" not in record)
        self._file = self._path.open("a", encoding="utf-8")

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(path: Path) -> list[Record]:
    """All records of a file; a last line cut short by a killed run is left out."""
    return list(_records(path)) if path.exists() else []


def plain(value: Any) -> Any:
    """The value as JSON can hold it: no NaN or infinity; tensors and arrays as lists, or of one element as numbers."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "item") and math.prod(value.shape) != 1:
        return plain(value.tolist())
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _pair(key: str, value: Any) -> str:
    try:
        return f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}"
    except TypeError as error:
        raise UserCodeError(
            f"a callback has added {key} to a record, of {type(value).__name__}: {error}; add numbers, texts, or lists "
            "of them"
        ) from error


def _records(path: Path) -> Iterator[Record]:
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(record, dict):
            yield record


def _keep(path: Path, stays: Callable[[Record], bool]) -> None:
    kept = [json.dumps(record) for record in _records(path) if stays(record)]
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
    temporary.replace(path)
