"""The state of the data: what a checkpoint keeps of it, so that training goes on with the next sample.

The order of samples is a pure function of the seed and a counter (`data/order.py`), so the state is integers, the same
on any number of ranks and for any size of batch: today the samples consumed, one integer for each source of a mixture.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from shardwise.data.batch import Batch
from shardwise.data.loader import Stream

SAMPLES = "samples"  # the key of the count, in checkpoints too


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
