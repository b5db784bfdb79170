"""The sources of a mixture in a checkpoint beside those of the job: which may differ, and what is said of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shardwise.errors import CheckpointError
from shardwise.words import listed


def source_changes(written: Mapping[str, Any], now: Mapping[str, Any], path: str, may_change: bool) -> list[str]:
    """Return what differs between the sources of a checkpoint's data and those of the job, in sentences.

    Raises:
        CheckpointError: a source holds something else than it did; or sources differ, and the job does not say that
            they may.
    """
    before, sources = written.get("sources") or {}, now.get("sources") or {}
    changed = [name for name in sources if name in before and _content(before[name]) != _content(sources[name])]
    if changed and written.get("tokenizer") != now.get("tokenizer"):
        raise CheckpointError(
            f"{path} was trained with the tokenizer in {written.get('tokenizer')}, and the job's sources give the one "
            f"in {now.get('tokenizer')}; set data.tokenizer to the former"
        )
    if changed:
        one = changed[0]
        shard = _other_shard(before[one].get("shards") or {}, sources[one].get("shards") or {})
        what = shard or f"{_in_words(before[one])}; now {_in_words(sources[one])}"
        raise CheckpointError(
            f"{path}: source {one!r} of data.sources holds something else than in the checkpoint ({what}); restore its "
            "files and its keys, or give what it holds now a name of its own, and set checkpoint.change_sources"
        )
    notes = list(_differences(before, sources))
    if notes and not may_change:
        raise CheckpointError(
            f"{path} was trained on other data.sources: {listed(notes, separator='; ')}; restore them, or set "
            "checkpoint.change_sources to go on with those of the job"
        )
    return [f"data.sources: {note}" for note in notes]


def _content(source: Mapping[str, Any]) -> tuple[Any, ...]:
    return source.get("content"), source.get("sequences"), source.get("shards")


def _in_words(source: Mapping[str, Any]) -> str:
    size = source.get("sequences")
    return f"{source.get('corpus')}, {'' if size is None else f'{size} sequences, '}hash {source.get('content')}"


def _other_shard(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return which shard of a stream is another than it was; empty where all are the same."""
    names = sorted(before.keys() | now.keys())
    other = [name for name in names if before.get(name) != now.get(name)] if before and now else []
    if not other:
        return ""
    was, is_now = before.get(other[0], "not there"), now.get(other[0], "gone")
    return f"shard {other[0]} is {is_now}, and was {was} (bytes, and time or version)"


def _differences(before: Mapping[str, Any], sources: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted(sources.keys() - before.keys()):
        yield f"{name} is new"
    for name in sorted(before.keys() - sources.keys()):
        yield f"{name} is left out"
    for name in sorted(sources.keys() & before.keys()):
        wrote, reads = _measure(before[name]), _measure(sources[name])
        if wrote != reads:
            yield f"{name} had {wrote}, has {reads}"


def _measure(source: Mapping[str, Any]) -> str:
    """Return a source's weights or passes in words; JSON has made lists of pairs."""
    if "repeat" in source:
        return f"repeat {source['repeat']:g}"
    first, *later = [(int(start), float(weight)) for start, weight in source.get("weights", [])]
    stages = "".join(f", {weight:g} from sample {start} on" for start, weight in later)
    return f"weight {first[1]:g}{stages}"
