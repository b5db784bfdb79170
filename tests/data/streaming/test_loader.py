"""Streams as sources of a mixture: random ones, through kills and other numbers of ranks, against their definitions."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.data.batch import Batch, wrap
from shardwise.data.mixture import Mixture
from shardwise.data.packing import ENDLESS, Windows
from shardwise.data.shares import Assignment
from shardwise.data.state import OF_SOURCE, SAMPLES
from shardwise.data.streaming.loader import InOrder, position_key, state_of_stream
from shardwise.job.mixture import fault_of
from shardwise.job.schema import Job
from shardwise.job.sources import load_job
from shardwise.testing.oracle_mixture import DefinedMixture
from tests.data.streaming.sources import KINDS, SEED, define, documents, first_tokens, opened, write

COUNT, LENGTH = 160, 16
LAYOUTS = ((1, 1), (1, 3), (2, 1), (2, 2), (3, 1))  # data ranks, microbatches


class Numbers:
    """Sequence i of source k is [k, i, 0, …]: a source that is tokenized before."""

    sequence_length = LENGTH

    def __init__(self, source: int, size: int) -> None:
        self.source, self.size = source, size

    def __len__(self) -> int:
        return self.size

    def batch(self, indices: Sequence[int], counters: Sequence[int], seed: int) -> Batch:
        ids = torch.tensor([self.row(index) for index in indices])
        return Batch({"input_ids": ids}, ids.clone(), torch.tensor(counters))

    def row(self, index: int) -> list[int]:
        return [self.source, index] + [0] * (LENGTH - 2)


class Drawn:
    """Sources that are drawn: the shards of those that are streams, the sizes of the others, and their weights."""

    def __init__(self, seed: int, directory: Path) -> None:
        draw = random.Random(seed)
        self.directory = directory
        self.is_stream = [True, *(draw.random() < 0.5 for _ in range(draw.randrange(1, 4)))]
        draw.shuffle(self.is_stream)
        self.names = [f"s{number}" for number in range(len(self.is_stream))]
        self.sizes = {name: draw.randrange(1, 50) for name in self.names}
        self.rows, self.contents = draw.choice([1, 3, 16]), dict[str, list[list[str]]]()
        for number, name in enumerate(self.names):
            if self.is_stream[number]:
                contents = documents(seed + number, draw.randrange(1, 6), draw.randrange(2, 40))
                self.contents[name] = [[*contents[0], f"at least this of {name}"], *contents[1:]]
                write(directory / name, draw.choice(KINDS), self.contents[name])
        weights = [round(draw.random() + 0.01, 3) for _ in self.names]
        self.stages = [(0, weights)]
        for start in sorted(draw.sample(range(1, COUNT), draw.randrange(0, 3))):
            changed = [draw.choice([0.0, 0.5, 2.0]) for _ in weights]
            self.stages.append((start, changed if any(changed) else weights))

    def job(self) -> Job:
        """The job that the oracle reads."""
        sources = [
            {"name": name, "path": name, "weight": weight, "streaming": streams}
            for name, weight, streams in zip(self.names, self.stages[0][1], self.is_stream, strict=True)
        ]
        stages = [
            {"samples": start, "weights": dict(zip(self.names, weights, strict=True))}
            for start, weights in self.stages[1:]
        ]
        return load_job({"data": {"sources": sources, "curriculum": stages}, "training": {"seed": SEED}})

    def mixture(self, run: str, rank: int, ranks: int, limit: int) -> Mixture:
        """The mixture as one rank of a run opens it."""
        splits: list[Any] = []
        for number, name in enumerate(self.names):
            if not self.is_stream[number]:
                splits.append(Numbers(number, self.sizes[name]))
                continue
            tokens = opened(define(self.directory / name, 0.1, self.rows), self.directory / "running", limit)
            tokens.join(f"{run}{name}", rank, ranks)
            splits.append(Windows(tokens, ENDLESS, LENGTH))
        return Mixture(tuple(self.names), tuple(splits), Assignment.of_weights(self.stages), SEED)

    def defined(self) -> list[list[int]]:
        """The token ids of every sample, by the definitions."""
        oracle = DefinedMixture(self.job(), self.sizes)
        places = [oracle.place_of(number) for number in range(COUNT)]
        tokens = {
            name: first_tokens(contents, (COUNT + 1) * LENGTH, 0.1, self.rows)
            for name, contents in self.contents.items()
        }
        return [
            tokens[self.names[source]][index * LENGTH : (index + 1) * LENGTH]
            if self.is_stream[source]
            else Numbers(source, 0).row(index)
            for source, index in places
        ]


def disturbed(seed: int, directory: Path) -> tuple[list[list[int]], list[list[int]], set[int]]:
    """Return the samples of a run that is killed and goes on with other ranks, those that are defined, and hashes.

    The hashes are of all samples, of the disturbed run and of one that is left alone: one number if all is well.
    """
    drawn, draw = Drawn(seed, directory), random.Random(seed)
    assert fault_of(drawn.job()) is None
    state, digest = dict[str, int](), 0
    read: dict[int, list[int]] = {}
    while state.get(SAMPLES, 0) < COUNT:
        stop = draw.randrange(state.get(SAMPLES, 0) + 1, COUNT + 1) if draw.random() < 0.6 else COUNT
        state, digest = _run(drawn, draw, state, digest, stop, draw.choice(LAYOUTS), read)
    _, undisturbed = _run(drawn, random.Random(0), {}, 0, COUNT, (1, 1), {})
    return [read[number] for number in range(COUNT)], drawn.defined(), {digest, undisturbed}


def _run(
    drawn: Drawn,
    draw: random.Random,
    state: dict[str, int],
    digest: int,
    stop: int,
    layout: tuple[int, int],
    read: dict[int, list[int]],
) -> tuple[dict[str, int], int]:
    """Go on from a state up to some sample, on a layout; return the state and the hash of the last checkpoint."""
    (ranks, accumulation), done = layout, state.get(SAMPLES, 0)
    limit, name = draw.choice([1 << 8, 1 << 14]), f"run{done}"
    mixtures = [drawn.mixture(name, rank, ranks, limit) for rank in range(ranks)]
    size = draw.randrange(4, 24)
    streams = [
        InOrder(mixture, SEED, size, -(-size // (ranks * accumulation)), accumulation, ranks, rank, total=COUNT)
        for rank, mixture in enumerate(mixtures)
    ]
    states = [state_of_stream(stream) for stream in streams]
    saved = (state, digest)
    try:
        for ours in states if state else []:
            ours.load_state_dict(json.loads(json.dumps(state)))
        while done < stop:
            for ours in states:
                for batch in ours.next_step():
                    digest = wrap(digest + batch.digest)
                    rows = zip(batch.rows.tolist(), batch.inputs["input_ids"].tolist(), batch.counted, strict=True)
                    read |= {row: ids for row, ids, is_real in rows if is_real}
            numbers, *others = [ours.state_dict() for ours in states]
            assert all(other == numbers for other in others)
            done = numbers[SAMPLES]
            if draw.random() < 0.7 or done >= COUNT:
                saved = (numbers, digest)
        producers = [tokens._process for tokens in streams[0].tokens.values() if tokens._process is not None]
        if producers and draw.random() < 0.5:
            os.kill(draw.choice(producers).pid, signal.SIGKILL)
    finally:
        for stream in streams:
            for tokens in stream.tokens.values():
                tokens.close()
    return saved


def test_a_disturbed_mixture_with_streams_loses_and_doubles_nothing(tmp_path: Path) -> None:
    read, right, hashes = disturbed(14, tmp_path)  # one that goes on behind the first block of its stream
    assert read == right and len(hashes) == 1


def test_the_position_of_a_stream_named_samples_is_no_count_of_a_source() -> None:
    """A file samples.jsonl gives the name; the keys of a count are told by how they begin."""
    assert not position_key("samples", "shard").startswith(OF_SOURCE)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 150))
def test_disturbed_mixtures_with_streams_lose_and_double_nothing(seed: int, tmp_path: Path) -> None:
    read, right, hashes = disturbed(seed, tmp_path)
    assert read == right and len(hashes) == 1
