"""metrics.jsonl: valid JSON whatever the numbers, readable while the run goes on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from shardwise.errors import UserCodeError
from shardwise.observe.metrics import MetricsWriter, plain, read_metrics


def test_each_record_is_one_flushed_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write({"step": 1, "loss": 2.5, "peak_memory_bytes": [1, 2]})
        assert read_metrics(path) == [{"step": 1, "loss": 2.5, "peak_memory_bytes": [1, 2]}]  # before close
        writer.write({"step": 1, "validation_loss": 2.25})
    assert [json.loads(line) for line in path.read_text().splitlines()] == read_metrics(path)
    assert len(read_metrics(path)) == 2


def test_not_finite_numbers_are_null() -> None:
    record = {"loss": float("nan"), "norms": [float("inf"), 1.0], "nested": {"x": float("-inf")}}
    assert plain(record) == {"loss": None, "norms": [None, 1.0], "nested": {"x": None}}


def test_tensors_of_one_element_are_numbers(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "m.jsonl") as writer:
        writer.write({"loss": torch.tensor(1.5), "skipped": torch.tensor(True), "tokens": torch.tensor(7)})
    assert read_metrics(tmp_path / "m.jsonl") == [{"loss": 1.5, "skipped": True, "tokens": 7}]


def test_what_callbacks_add(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "m.jsonl") as writer:
        writer.write({"step": 1, "confusion": torch.eye(2), "shares": np.array([0.5, np.nan]), "none": torch.ones(0)})
        with pytest.raises(UserCodeError, match=r"a callback has added seen to a record, of set: .*; add numbers"):
            writer.write({"step": 1, "seen": {1, 2}})
    shown = {"step": 1, "confusion": [[1.0, 0.0], [0.0, 1.0]], "shares": [0.5, None], "none": []}
    assert read_metrics(tmp_path / "m.jsonl") == [shown]


def test_a_line_cut_short_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    assert read_metrics(path) == [{"step": 1}]


def test_resume_drops_what_was_written_after_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 2, "validation_loss": 3.0}\n{"step": 3}\n{"step": 4, "lo')
    with MetricsWriter(path, resume_step=2) as writer:
        writer.write({"step": 3, "loss": 1.0})
    assert read_metrics(path) == [
        {"step": 1},
        {"step": 2},
        {"step": 2, "validation_loss": 3.0},
        {"step": 3, "loss": 1.0},
    ]


def test_without_resume_nothing_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    with MetricsWriter(path) as writer:
        writer.write({"step": 2})
    assert read_metrics(path) == [{"step": 1}, {"step": 2}]
