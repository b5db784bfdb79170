"""The batches of one rank from streams: each is read window by window, and only forward.

Of a run on one stream sample c is its window c; of a mixture the n-th sample of a source that is a stream its window n.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.data.batch import Batch
from shardwise.data.loader import Split, Stream
from shardwise.data.mixture import Mixture
from shardwise.data.packing import Windows, is_stream
from shardwise.data.state import ConsumedSamples, ConsumedSources, DataState, data_state
from shardwise.data.streaming.definition import Position
from shardwise.data.streaming.tokens import StreamedTokens

ALONE = ""  # stands for the name of a stream that is no source of a mixture


def streamed_tokens(split: object) -> dict[str, StreamedTokens]:
    """Return the tokens of those sources of a split that are streams, by name."""
    parts = dict(zip(split.names, split.splits, strict=True)) if isinstance(split, Mixture) else {ALONE: split}
    streams = {name: part.stream for name, part in parts.items() if isinstance(part, Windows) and is_stream(part)}
    return {name: tokens for name, tokens in streams.items() if isinstance(tokens, StreamedTokens)}


class InOrder(Stream):
    """One data rank's view of a stream, or of several sources of which some are streams."""

    def batches_from(self, consumed: int) -> list[Batch]:
        """The microbatches of this rank in the step that follows `consumed` samples."""
        after = self.first_tokens(consumed + self.samples_after(consumed))
        for name, token in self.first_tokens(consumed).items():
            if after[name] > token:  # else it may wait for its turn, without a process that reads it
                self.tokens[name].advance(token)
        return super().batches_from(consumed)

    @property
    def tokens(self) -> dict[str, StreamedTokens]:
        """The tokens of each stream by the name of its source."""
        return streamed_tokens(self.split)

    def first_tokens(self, sample: int) -> dict[str, int]:
        """Return the token of each stream that its first window from a sample on begins with."""
        windows = windows_before(self.split, sample)
        assert isinstance(self.split, Windows | Mixture)
        return {name: windows[name] * self.split.sequence_length for name in self.tokens}


def windows_before(split: Split, sample: int) -> dict[str, int]:
    """Return how many samples of each source come before a sample of the run."""
    if isinstance(split, Mixture):
        return dict(zip(split.names, split.counts(sample), strict=True))
    return {ALONE: sample}


def state_of_stream(stream: Stream) -> DataState:
    """Return the state of a rank's training samples, at their beginning."""
    if not isinstance(stream, InOrder):
        return data_state(stream)
    return SourcesState(stream, stream.split) if isinstance(stream.split, Mixture) else StreamState(stream)


class StreamState(ConsumedSamples):
    """Samples consumed, with the position near them from which each stream can be read again."""

    def state_dict(self) -> dict[str, int]:
        """Return the state, and of each stream a shard, a row and the tokens before them."""
        return super().state_dict() | positions(self._in_order, self._samples)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on after so many samples; a stream that has no position is read from its beginning to there."""
        super().load_state_dict(state)
        begin_at(self._in_order, self._samples, state)

    @property
    def _in_order(self) -> InOrder:
        assert isinstance(self._stream, InOrder)
        return self._stream


class SourcesState(StreamState, ConsumedSources):
    """The state of a mixture some of whose sources are streams."""


def position_key(name: str, field: str) -> str:
    """Return the name of a number of a stream's position in the state of the data."""
    return field if name == ALONE else f"{name}/{field}"


def positions(stream: InOrder, samples: int) -> dict[str, int]:
    """Return the numbers of the last position of each stream before a sample, equal on every rank."""
    tokens = stream.tokens
    places = {name: tokens[name].position(first) for name, first in stream.first_tokens(samples).items()}
    return {
        position_key(name, field): number for name, place in places.items() for field, number in place._asdict().items()
    }


def begin_at(stream: InOrder, samples: int, state: Mapping[str, int]) -> None:
    """Read each stream from its position in `state` on, up to what follows so many samples."""
    tokens = stream.tokens
    for name, first in stream.first_tokens(samples).items():
        place = Position(*(state.get(position_key(name, field), 0) for field in Position._fields))
        tokens[name].begin(place, first)
