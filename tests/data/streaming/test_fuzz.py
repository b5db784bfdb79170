"""Random streams, with kills of the producer and other numbers of ranks at each resume: no token lost, none doubled."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import numpy as np
import pytest
import xxhash

from shardwise.data.streaming.definition import Position, StreamDefinition
from tests.data.streaming.sources import KINDS, define, documents, first_tokens, opened, write

SAMPLES, LENGTH, EXTRA = 240, 32, 1


def consumed(seed: int, directory: Path) -> tuple[str, str]:
    """Return the hashes of the samples that a disturbed run of many ranks reads, and of those that are defined."""
    draw = random.Random(seed)
    contents = documents(seed, draw.randrange(1, 9), draw.randrange(2, 60))
    contents[0] = [*contents[0], "at least this"]
    held_out, rows = draw.choice([0.0, 0.1]), draw.choice([1, 3, 16, 500])
    write(directory / "source", draw.choice(KINDS), contents)
    definition = define(directory / "source", held_out, rows)
    right = first_tokens(contents, SAMPLES * LENGTH + EXTRA, held_out, rows)
    read = np.zeros((SAMPLES, LENGTH + EXTRA), dtype=np.int32)
    done, place = 0, Position()
    while done < SAMPLES:
        done, place = _until_a_disturbance(draw, definition, directory / "running", read, done, place)
    windows = np.array([right[start : start + LENGTH + EXTRA] for start in range(0, SAMPLES * LENGTH, LENGTH)])
    own, defined = (xxhash.xxh3_64_hexdigest(samples.astype(np.int32).tobytes()) for samples in (read, windows))
    return own, defined


def _until_a_disturbance(
    draw: random.Random, definition: StreamDefinition, root: Path, read: np.ndarray, done: int, place: Position
) -> tuple[int, Position]:
    """Read some steps on some number of ranks; return the samples done at the last checkpoint, and its position."""
    count, size = draw.randrange(1, 4), draw.randrange(1, 13)
    ranks = [opened(definition, root, draw.choice([1 << 8, 1 << 14]), draw.randrange(1, 3)) for _ in range(count)]
    stop, is_kill = draw.randrange(done + 1, SAMPLES + 1) if draw.random() < 0.6 else SAMPLES, draw.random() < 0.5
    saved = (done, place)
    try:
        for rank, stream in enumerate(ranks):
            stream.join(f"run{draw.randrange(1 << 30)}" if count == 1 else f"run{done}", rank, count)
            stream.begin(place, done * LENGTH)
        while done < stop:
            step = range(done, min(done + size, SAMPLES))
            for rank, stream in enumerate(ranks):
                stream.advance(done * LENGTH)
                for sample in step[rank::count]:
                    read[sample] = stream.read(sample * LENGTH, (sample + 1) * LENGTH + EXTRA)
            done = step.stop
            [position] = {stream.position(done * LENGTH) for stream in ranks}
            saved = (done, position)
        if is_kill and ranks[0]._process is not None:
            os.kill(ranks[0]._process.pid, signal.SIGKILL)
    finally:
        for stream in ranks:
            stream.close()
    return saved


def test_a_disturbed_stream_loses_and_doubles_nothing(tmp_path: Path) -> None:
    own, right = consumed(1, tmp_path)
    assert own == right


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 140))
def test_disturbed_streams_lose_and_double_nothing(seed: int, tmp_path: Path) -> None:
    own, right = consumed(seed, tmp_path)
    assert own == right
