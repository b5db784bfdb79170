"""Tiny corpora."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwise.job.schema import Job

TEXTS = [
    "the cat sat on the mat and looked at the other cat\n" * 6,
    "a second document, with ünïcödé and 中文 in it\n" * 5,
    "third: the dog sat on the log\n" * 12,
    "fourth and last, the cat and the dog\n" * 9,
]

JobMaker = Callable[..., Job]


@pytest.fixture
def make_job(tmp_path: Path) -> JobMaker:
    """`make_job(path=..., task="masked_lm")`: a job with a small vocabulary and its own cache; keys of `data`."""

    def make(task: str = "causal_lm", model: dict[str, Any] | None = None, **data: Any) -> Job:
        defaults = {"cache_directory": str(tmp_path / "cache"), "vocabulary_size": 300, "sequence_length": 16}
        defaults["validation_fraction"] = 0.2
        return Job(model={"task": task, **(model or {})}, data=defaults | data)

    return make


@pytest.fixture
def text_directory(tmp_path: Path) -> Path:
    """Four text files."""
    directory = tmp_path / "texts"
    directory.mkdir()
    for number, text in enumerate(TEXTS):
        (directory / f"{number}.txt").write_text(text, encoding="utf-8")
    return directory


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    """Token ids 1 … 400 in documents of 10, 11, 12 … tokens."""
    path = tmp_path / "tokens.jsonl"
    rows, start, length = [], 1, 10
    while start <= 400:
        rows.append({"input_ids": list(range(start, min(401, start + length)))})
        start, length = start + length, length + 1
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
