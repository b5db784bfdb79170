"""Tokens that a stream has given, and waits for it: in each step's record, and in a sentence at the end."""

from __future__ import annotations

from shardwise.data.streaming.tokens import StreamedTokens
from shardwise.observe.callback import Callback, ObservedSession
from shardwise.observe.metrics import Record
from shardwise.training.setup import AssembledJob


class StreamReport(Callback):
    """Adds how fast tokens are made ahead; names shards that are skipped as they come; of rank 0's host."""

    rank_zero_only = True

    def __init__(self, assembled: AssembledJob) -> None:
        self._tokens = assembled.data.streamed
        self._skipped: set[str] = set()

    def on_step_end(self, session: ObservedSession, record: Record) -> None:
        """Add to the record, and say what has been skipped since the last step."""
        if self._tokens is None:
            return
        status = self._tokens.status()
        skipped = status.get("skipped", {})
        record |= {
            "stream_tokens_per_second": status.get("tokens_per_second", 0.0),
            "stream_waited_seconds": self._tokens.waited,
            "stream_skipped_shards": len(skipped),
        }
        for name, row in skipped.items():
            if name not in self._skipped:
                session.note(f"{name} is damaged and is passed over from row {row} on (data.on_bad_files: skip)")
        self._skipped |= set(skipped)

    def on_end(self, session: ObservedSession, result: Record) -> None:
        """Say what the stream has come to."""
        if self._tokens is not None and (status := self._tokens.status()):
            session.note(summary(self._tokens, status))


def summary(tokens: StreamedTokens, status: Record) -> str:
    """Return a sentence on a stream's throughput."""
    passes, shard = divmod(int(status.get("shards", 0)), len(tokens.definition.shards))
    skipped = len(status.get("skipped", {}))
    return (
        f"stream: {status.get('tokens', 0):,} tokens made at {status.get('tokens_per_second', 0):,.0f} a second; "
        f"training waited {tokens.waited:.1f} s for them; it is at shard {shard + 1} of "
        f"{len(tokens.definition.shards)} in pass {passes + 1}, {skipped} damaged"
    )
