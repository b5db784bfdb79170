"""Traces hold exactly the operators of the chosen steps."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwise.job.schema import Job
from shardwise.observe.profile import Profiler


def job(window: list[int] | None, output: Path) -> Job:
    return Job.model_validate({"observe": {"profile": window}, "training": {"steps": 5}, "output": str(output)})


def shapes_of_products(path: Path) -> list[Any]:
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return [event["args"]["Input Dims"][0][0] for event in events if event.get("name") == "aten::mm"]


def run(window: list[int] | None, output: Path, done: int = 0, until: int = 5) -> None:
    """Step k multiplies a matrix of k rows, so that a trace tells which steps it holds."""
    session: Any = SimpleNamespace(steps_done=done)
    traced = Profiler(job(window, output))
    traced.on_start(session)
    for session.steps_done in range(done + 1, until + 1):
        torch.ones(session.steps_done, 2) @ torch.ones(2, 2)
        traced.on_step_end(session, {})
    traced.on_end(session, {})


@pytest.mark.parametrize("window, steps", [([2, 3], [2, 3]), ([1, 1], [1]), ([4, 9], [4, 5])])
def test_trace_holds_the_chosen_steps(window: list[int], steps: list[int], tmp_path: Path) -> None:
    run(window, tmp_path)
    (trace,) = (tmp_path / "profile").iterdir()
    assert trace.name == f"rank0-steps-{window[0]}-{window[-1]}.json.gz"
    assert shapes_of_products(trace) == steps


def test_a_resumed_run_counts_on(tmp_path: Path) -> None:
    run([2, 4], tmp_path, done=2)
    (trace,) = (tmp_path / "profile").iterdir()
    assert shapes_of_products(trace) == [3, 4]


def test_a_run_that_ends_in_the_window_keeps_its_trace(tmp_path: Path) -> None:
    run([2, 5], tmp_path, until=3)
    (trace,) = (tmp_path / "profile").iterdir()
    assert shapes_of_products(trace) == [2, 3]


def test_nothing_is_written_unless_asked(tmp_path: Path) -> None:
    run(None, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_profiler_itself_says_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its own log lines go past Python to the terminal and would break up the live display."""
    run([2, 3], tmp_path)
    print("still here", file=sys.stderr)
    assert capfd.readouterr().err == "still here\n"
