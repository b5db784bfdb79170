"""Sources of a checkpoint beside those of a job: what is refused, and what is said where they may differ."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.checkpoint.source_changes import source_changes
from shardwise.errors import CheckpointError


def of(tokenizer: str = "t", **sources: Any) -> dict[str, Any]:
    return {"tokenizer": tokenizer, "sources": sources}


def a_source(weight: float = 1.0, content: str = "c", sequences: int = 9) -> dict[str, Any]:
    return {"corpus": "jsonl: x", "content": content, "sequences": sequences, "weights": [[0, weight], [50, 2.0]]}


def test_the_same_sources_need_no_word() -> None:
    assert source_changes(of(a=a_source()), of(a=a_source()), "path", False) == []
    assert source_changes({}, {}, "path", False) == []


def test_other_weights_and_sources_need_the_key() -> None:
    before, now = of(a=a_source(), b=a_source()), of(a=a_source(3.0), c=a_source())
    with pytest.raises(CheckpointError, match=r"c is new; b is left out; a had weight 1, 2 from.*change_sources"):
        source_changes(before, now, "path", False)
    notes = source_changes(before, now, "path", True)
    assert notes[0] == "data.sources: c is new" and len(notes) == 3


def test_a_source_that_holds_something_else_is_refused_with_the_key_too() -> None:
    with pytest.raises(CheckpointError, match=r"source 'a' of data.sources holds something else.*name of its own"):
        source_changes(of(a=a_source()), of(a=a_source(content="d")), "path", True)
    was, now = ({**a_source(), "sequences": None, "shards": {"p0": stamp}} for stamp in ("9 1", "9 2"))
    with pytest.raises(CheckpointError, match=r"source 'a' .*shard p0 is 9 2, and was 9 1"):
        source_changes(of(a=was), of(a=now), "path", True)
    with pytest.raises(CheckpointError, match=r"set data.tokenizer to the former"):
        source_changes(of(a=a_source()), of("u", a=a_source(content="d"), b=a_source()), "path", True)
