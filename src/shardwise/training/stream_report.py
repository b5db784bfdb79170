"""Tokens that streams have given, and waits for them: in each step's record, and in a sentence at the end."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.data.streaming.tokens import StreamedTokens
from shardwise.observe.callback import Callback, ObservedSession
from shardwise.observe.metrics import Record
from shardwise.training.setup import AssembledJob


class StreamReport(Callback):
    """Adds how fast tokens are made ahead; names shards that are skipped as they come; of rank 0's host."""

    rank_zero_only = True

    def __init__(self, assembled: AssembledJob) -> None:
        self._streams = assembled.data.streams
        self._skipped: set[tuple[str, str]] = set()

    def on_step_end(self, session: ObservedSession, record: Record) -> None:
        """Add to the record, and say what has been skipped since the last step."""
        if not self._streams:
            return
        states = {name: tokens.status() for name, tokens in self._streams.items()}
        record |= step_figures(self._streams, states)
        for name, status in states.items():
            for shard, row in status.get("skipped", {}).items():
                if (name, shard) not in self._skipped:
                    self._skipped.add((name, shard))
                    session.note(
                        f"{prefix(name)}{shard} is damaged and is passed over from row {row} on "
                        "(data.on_bad_files: skip)"
                    )

    def on_end(self, session: ObservedSession, result: Record) -> None:
        """Say what the streams have come to."""
        for name, tokens in self._streams.items():
            if status := tokens.status():
                session.note(summary(name, tokens, status))


def step_figures(streams: Mapping[str, StreamedTokens], states: Mapping[str, Record]) -> Record:
    """Return what all streams have come to together, and of several sources for which of them training waited."""
    of_sources = {f"stream_waited_seconds/{name}": tokens.waited for name, tokens in streams.items() if name}
    return {
        "stream_tokens_per_second": sum(status.get("tokens_per_second", 0.0) for status in states.values()),
        "stream_waited_seconds": sum(tokens.waited for tokens in streams.values()),
        "stream_skipped_shards": sum(len(status.get("skipped", {})) for status in states.values()),
        **of_sources,
    }


def prefix(name: str) -> str:
    """Return the words that say of which source a sentence is; nothing where there is but one."""
    return f"{name}: " if name else ""


def summary(name: str, tokens: StreamedTokens, status: Record) -> str:
    """Return a sentence on a stream's throughput."""
    passes, shard = divmod(int(status.get("shards", 0)), len(tokens.definition.shards))
    skipped = len(status.get("skipped", {}))
    return (
        f"{prefix(name)}stream: {status.get('tokens', 0):,} tokens made at {status.get('tokens_per_second', 0):,.0f} "
        f"a second; training waited {tokens.waited:.1f} s for them; it is at shard {shard + 1} of "
        f"{len(tokens.definition.shards)} in pass {passes + 1}, {skipped} damaged"
    )
