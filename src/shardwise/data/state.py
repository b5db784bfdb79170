"""The state of the data: what a checkpoint keeps of it, so that training goes on with the next sample.

The order of samples is a pure function of the seed and a counter (`data/order.py`), so the state is integers, the same
on any number of ranks and for any size of batch: the samples consumed, and for a mixture those of each source too. The
latter follow from the former by the weights, unless these were others before. Streams add where they are read from
(`data/streaming/loader.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

from shardwise.data.batch import Batch
from shardwise.data.loader import Stream
from shardwise.data.mixture import Mixture

SAMPLES = "samples"  # the key of the count, in checkpoints too
# Before the name of a source, the key of its own count. The space keeps it apart from a stream named `samples`, whose
# position has keys that begin with its name.
OF_SOURCE = f"{SAMPLES} of "


class DataState(Protocol):
    """Whatever gives a rank its batches and can go on from a state, as torch's `Stateful` does."""

    def next_step(self) -> list[Batch]:
        """Return this rank's microbatches of the next step, and count its samples as consumed."""
        ...

    def state_dict(self) -> dict[str, int]:
        """Return what was consumed by name, equal on every rank."""
        ...

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from `state`."""
        ...


class ConsumedSamples:
    """The training split of one corpus, read from the samples consumed on."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._samples = 0

    def next_step(self) -> list[Batch]:
        """Return this rank's microbatches of the next step, and count its samples as consumed."""
        batches = self._stream.batches_from(self._samples)
        self._samples += self._stream.samples_after(self._samples)
        return batches

    def state_dict(self) -> dict[str, int]:
        """Return the samples consumed by all ranks."""
        return {SAMPLES: self._samples}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on after so many samples."""
        self._samples = state[SAMPLES]


class ConsumedSources(ConsumedSamples):
    """The training samples of a mixture, each source of which goes on where it has come to."""

    def __init__(self, stream: Stream, mixture: Mixture) -> None:
        super().__init__(stream)
        self._mixture = stream.split = mixture
        self._others: dict[str, int] = {}  # counts, and positions, of sources that are left out now

    def state_dict(self) -> dict[str, int]:
        """Return the samples consumed by all ranks, in all and of each source."""
        counts = zip(self._mixture.names, self._mixture.counts(self._samples), strict=True)
        return super().state_dict() | self._others | {f"{OF_SOURCE}{name}": count for name, count in counts}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on after so many samples, so many of each source; a source that is not named begins."""
        super().load_state_dict(state)
        names = {f"{OF_SOURCE}{name}": name for name in self._mixture.names}
        self._others = {key: count for key, count in state.items() if key != SAMPLES and key not in names}
        expected = self._mixture.assignment.counts(self._samples)
        ahead = tuple(state.get(key, 0) - count for key, count in zip(names, expected, strict=True))
        self._mixture = self._stream.split = replace(self._mixture, ahead=ahead)


def data_state(stream: Stream) -> DataState:
    """Return the state of a stream's training split, at its beginning."""
    return ConsumedSources(stream, stream.split) if isinstance(stream.split, Mixture) else ConsumedSamples(stream)
