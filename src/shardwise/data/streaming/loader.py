"""The batches of one rank from a stream: sample c of the run is the stream's window c, and only forward."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.data.batch import Batch
from shardwise.data.loader import Stream
from shardwise.data.packing import Windows
from shardwise.data.state import ConsumedSamples, DataState, data_state
from shardwise.data.streaming.definition import Position
from shardwise.data.streaming.tokens import StreamedTokens


class InOrder(Stream):
    """One data rank's view of a stream."""

    @property
    def tokens(self) -> StreamedTokens:
        """The stream's tokens."""
        assert isinstance(self.split, Windows) and isinstance(self.split.stream, StreamedTokens)
        return self.split.stream

    def batches_from(self, consumed: int) -> list[Batch]:
        """The microbatches of this rank in the step that follows `consumed` samples."""
        self.tokens.advance(self.first_token(consumed))
        return super().batches_from(consumed)

    def first_token(self, sample: int) -> int:
        """Return the token of the stream that a sample begins with."""
        assert isinstance(self.split, Windows)
        return sample * self.split.sequence_length


def state_of_stream(stream: Stream) -> DataState:
    """Return the state of a rank's training samples, at their beginning."""
    return StreamState(stream) if isinstance(stream, InOrder) else data_state(stream)


class StreamState(ConsumedSamples):
    """A stream, read from the samples consumed on, with the position near them from which it can be read again."""

    def __init__(self, stream: InOrder) -> None:
        super().__init__(stream)
        self._in_order = stream

    def state_dict(self) -> dict[str, int]:
        """Return the samples consumed by all ranks, and a shard, a row and the tokens before them."""
        position = self._in_order.tokens.position(self._in_order.first_token(self._samples))
        return super().state_dict() | position._asdict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on after so many samples; without a position the stream is read from its beginning to there."""
        super().load_state_dict(state)
        place = Position(*(state.get(field, 0) for field in Position._fields))
        self._in_order.tokens.begin(place, self._in_order.first_token(self._samples))
