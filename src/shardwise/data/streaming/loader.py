"""The batches of one rank from a stream: sample c of the run is the stream's window c, and only forward."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.data.batch import Batch
from shardwise.data.loader import Stream
from shardwise.data.packing import Windows
from shardwise.data.state import SAMPLES, DataState, data_state
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
        """The `accumulation` microbatches of this rank in the step that follows `consumed` samples."""
        self.tokens.advance(self.first_token(consumed))
        return super().batches_from(consumed)

    def first_token(self, sample: int) -> int:
        """Return the token of the stream that a sample begins with."""
        assert isinstance(self.split, Windows)
        return sample * self.split.sequence_length


def state_of_stream(stream: Stream) -> DataState:
    """Return the state of a rank's training samples, at their beginning."""
    return StreamState(stream) if isinstance(stream, InOrder) else data_state(stream)


class StreamState:
    """A stream, read from the samples consumed on, with the position near them from which it can be read again."""

    def __init__(self, stream: InOrder) -> None:
        self._stream = stream
        self._samples = 0

    def next_step(self) -> list[Batch]:
        """Return this rank's microbatches of the next step, and count its samples as consumed."""
        batches = self._stream.batches_from(self._samples)
        self._samples += self._stream.sequences_per_step
        return batches

    def state_dict(self) -> dict[str, int]:
        """Return the samples consumed by all ranks, and a shard, a row and the tokens before them."""
        position = self._stream.tokens.position(self._stream.first_token(self._samples))
        return {SAMPLES: self._samples, **position._asdict()}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on after so many samples; without a position the stream is read from its beginning to there."""
        self._samples = state[SAMPLES]
        place = Position(*(state.get(field, 0) for field in Position._fields))
        self._stream.tokens.begin(place, self._stream.first_token(self._samples))
