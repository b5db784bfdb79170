"""A trained model is written first, and what fails later does not take it away."""

from __future__ import annotations

import errno
import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.errors import DataError, OutputError
from shardwise.job.schema import Job
from shardwise.observe.trackers import Tracker
from shardwise.training import prompts, run_end
from shardwise.training import recorder as recorder_module
from shardwise.training.recorder import Recorder
from shardwise.training.run_end import ModelExport, TextSample


def session_of(job: Job, steps_done: int = 0) -> Any:
    notes: list[str] = []
    plan = SimpleNamespace(steps=job.training.steps)
    model = SimpleNamespace(ema=None)
    facts: dict[str, Any] = {"rank": 0, "steps_done": steps_done, "note": notes.append, "notes": notes}
    return SimpleNamespace(job=job, plan=plan, model=model, averaged=nullcontext, **facts)


def assembled_of(job: Job, tokenizer_directory: str | None = None) -> Any:
    data = SimpleNamespace(tokenizer_directory=tokenizer_directory, prompt=lambda length: [1, 2])
    facts = SimpleNamespace(generates_text=True, adapters={})
    return SimpleNamespace(plan=SimpleNamespace(job=job, sequence_length=8), data=data, facts=facts, model=None)


def test_the_model_is_written_after_the_last_step_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    monkeypatch.setattr(run_end, "export_hugging_face", lambda *arguments: written.append(session.steps_done))
    job = Job(training={"steps": 2})
    export = ModelExport(assembled_of(job))
    for step in (1, 2):
        session = session_of(job, step)
        export.on_step_end(session, {})
    export.on_end(session, {"stopped": None})
    assert written == [2]
    ModelExport(assembled_of(job)).on_end(session, {"stopped": None})  # resumed at its last step
    assert written == [2, 2]


def test_a_prompt_without_a_token_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = SimpleNamespace(chat_template=None, encode=lambda text: list(text.encode()))
    monkeypatch.setattr(prompts, "open_tokenizer", lambda assembled: tokenizer)
    job = Job(evaluation={"prompts": ["3 + 4 =", ""]})
    with pytest.raises(DataError, match=r"evaluation\.prompts\[1\]='' has no token; give a text"):
        prompts.PromptSamples(assembled_of(job)).on_start(session_of(job))


def test_a_sample_that_fails_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> list[int]:
        raise KeyError("of the tokenizer's own code")

    job = Job(output=str(tmp_path))
    session = session_of(job)
    sample = TextSample(assembled_of(job, str(tmp_path)))
    monkeypatch.setattr(run_end, "load_tokenizer", lambda source: SimpleNamespace())
    monkeypatch.setattr(run_end, "generate", fail)
    sample.on_start(session)
    sample.on_end(session, {"stopped": None})
    assert session.notes == ['no sample: KeyError: "of the tokenizer\'s own code"']


def test_a_report_that_fails_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(output: Path) -> None:
        raise ValueError("of a chart")

    recorder = object.__new__(Recorder)
    recorder.output, recorder.description, recorder._metrics = tmp_path, {}, None
    monkeypatch.setattr(recorder_module, "write_report", fail)
    session = session_of(Job())
    recorder.on_end(session, {"steps": 2})
    assert session.notes == ["no report: ValueError: of a chart"]
    assert json.loads((tmp_path / "run.json").read_text())["result"] == {"steps": 2}


class LostServer(Tracker):
    """A tracker whose server is gone when the run ends."""

    name = "lost"
    error: Exception = ConnectionError("connection reset by peer")

    def close(self) -> None:
        raise self.error


def test_a_tracker_that_cannot_be_closed_is_a_note(tmp_path: Path) -> None:
    session = session_of(Job())
    tracker = LostServer(tmp_path)
    tracker.on_end(session, {})
    assert session.notes == ["observe.lost: the tracker could not be closed: ConnectionError: connection reset by peer"]
    tracker.error = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OutputError, match="cannot be written any more: No space left"):
        tracker.on_end(session, {})


def test_the_tokenizer_of_the_sample_is_opened_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(model={"path": str(tmp_path), "trust_remote_code": True})
    sources: list[Any] = []
    monkeypatch.setattr(run_end, "load_tokenizer", sources.append)
    TextSample(assembled_of(job, str(tmp_path))).on_start(session_of(job))
    assert (sources[0].trust_remote_code, sources[0].key) == (True, "model.path")
    monkeypatch.undo()
    with pytest.raises(DataError, match=r"model\.path=.* cannot be opened"):
        TextSample(assembled_of(job, str(tmp_path))).on_start(session_of(job))
