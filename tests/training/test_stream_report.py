"""What steps and the end of a run say of the streams that it read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from shardwise.training.stream_report import StreamReport


def a_stream(waited: float, **status: Any) -> SimpleNamespace:
    definition = SimpleNamespace(shards=[None] * 4)
    return SimpleNamespace(waited=waited, status=lambda: status, definition=definition)


def test_a_step_and_the_end_say_what_streams_have_come_to() -> None:
    streams = {
        "web": a_stream(1.5, tokens=9000, tokens_per_second=300.0, shards=6, skipped={"part-1.jsonl": 7}),
        "code": a_stream(0.25, tokens=10, tokens_per_second=2.0, shards=0),
    }
    report = StreamReport(SimpleNamespace(data=SimpleNamespace(streams=streams)))  # type: ignore[arg-type]
    notes: list[str] = []
    session: Any = SimpleNamespace(note=notes.append)
    for _ in range(2):
        record: dict[str, Any] = {}
        report.on_step_end(session, record)
    assert record == {
        "stream_tokens_per_second": 302.0,
        "stream_waited_seconds": 1.75,
        "stream_skipped_shards": 1,
        "stream_waited_seconds/web": 1.5,
        "stream_waited_seconds/code": 0.25,
    }
    said = "web: part-1.jsonl is damaged and is passed over from row 7 on (data.on_bad_files: skip)"
    assert notes == [said]  # once
    report.on_end(session, {})
    assert notes[1] == (
        "web: stream: 9,000 tokens made at 300 a second; training waited 1.5 s for them; it is at shard 3 of 4 in "
        "pass 2, 1 damaged"
    )
    assert notes[2].startswith("code: stream: 10 tokens made at 2 a second") and len(notes) == 3


def test_a_run_without_streams_says_nothing() -> None:
    report = StreamReport(SimpleNamespace(data=SimpleNamespace(streams={})))  # type: ignore[arg-type]
    record: dict[str, Any] = {}
    report.on_step_end(None, record)  # type: ignore[arg-type]
    assert record == {}
