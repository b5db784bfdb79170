"""The oracle's own reading of several sources: whose each sample is, and which of theirs.

Written from the definitions in `data/shares.py` and `data/mixture.py`, not with their code: sample after sample from
the first on, with fractions, and nothing is looked up. Each source is read by the oracle's reader of one corpus.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import cycle, islice
from typing import Protocol

import torch
from torch import Tensor

from shardwise.job.schema import Job
from shardwise.testing.oracle_data import EVALUATION, Places, Rows, Source, shuffled_index

WINDOW = 1000
FINEST = 65_536


class DefinedMixture:
    """The source of every sample, and its number there, for sources of these sizes."""

    def __init__(self, job: Job, sizes: Mapping[str, int]) -> None:
        self.names, self.seed = sorted(sizes), job.training.seed
        self.sizes = [sizes[name] for name in self.names]
        self.stages = _stages(job, self.names)
        repeats = {_name(source): source.repeat or 1 for source in job.data.sources}
        self.streams = {_name(source) for source in job.data.sources if source.streaming}
        self.epoch = [max(1, round(sizes[name] * repeats[name])) for name in self.names]
        self._training, self._held_out = self._endless(self.stages), self._endless(self.stages[-1:])
        self._read: dict[bool, list[tuple[int, int]]] = {True: [], False: []}

    def place_of(self, counter: int) -> tuple[int, int]:
        """Return the number of a training sample's source, and of its sequence there."""
        source, number = self.numbered(counter, held_out=False)
        if self.names[source] in self.streams:  # its windows come as they are
            return source, number
        digest = hashlib.blake2b(f"{self.seed}:{self.names[source]}".encode(), digest_size=8).digest()
        return source, shuffled_index(int.from_bytes(digest, "little") >> 1, number, self.sizes[source])

    def numbered(self, sample: int, held_out: bool) -> tuple[int, int]:
        """Return the source of a sample, and how many samples before it are of the same."""
        known, whose = self._read[held_out], self._held_out if held_out else self._training
        while len(known) <= sample:
            source = next(whose)
            before = next((number for other, number in reversed(known) if other == source), -1)
            known.append((source, before + 1))
        return known[sample]

    def _endless(self, stages: Sequence[tuple[int, Sequence[Fraction]]]) -> Iterator[int]:
        if not stages:
            while True:
                yield from _epoch(self.epoch)
        ends = [start for start, _ in stages[1:]]
        for (start, weights), end in zip(stages, [*ends, None], strict=True):
            yield from islice(_stretch(weights, WINDOW), None if end is None else end - start)


def _name(source: object) -> str:
    label: str = source.label  # type: ignore[attr-defined]
    return label


def _stages(job: Job, names: Sequence[str]) -> list[tuple[int, list[Fraction]]]:
    """(first sample, weight of each source) of each stage; none where sources have passes."""
    weights = {_name(source): source.weight for source in job.data.sources}
    if all(weight is None for weight in weights.values()):
        return []
    stages = [(0, [Fraction(str(weights[name])) for name in names])]
    for stage in job.data.curriculum:
        weights |= stage.weights
        start = stage.samples or math.ceil(Fraction(stage.tokens or 0, job.data.sequence_length))
        stages.append((start, [Fraction(str(weights[name])) for name in names]))
    return stages


def _epoch(samples: Sequence[int]) -> Iterator[int]:
    whole = sum(samples) // WINDOW * WINDOW
    first = list(islice(_stretch([Fraction(count) for count in samples], WINDOW), whole))
    yield from first
    lacking = [Fraction(count - first.count(source)) for source, count in enumerate(samples)]
    rest = sum(samples) - whole
    if rest:
        yield from islice(_stretch(lacking, rest), rest)


def _stretch(weights: Sequence[Fraction], block: int) -> Iterator[int]:
    """The source of sample after sample, without an end."""
    parts = _parts_of_a_block(weights, block)
    fixed = [math.floor(part) for part in parts]
    left = [part - whole for part, whole in zip(parts, fixed, strict=True)]
    spare = int(sum(left))
    pattern = [slot[0] for slot in islice(_fair([Fraction(n, block) for n in [*fixed, spare]], 1), block)]
    period = math.lcm(*(share.denominator for share in left))
    holders: list[int] = []
    for chosen in cycle(list(islice(_fair(left, spare), period)) if period <= WINDOW else _fair(left, spare)):
        gone = sorted(set(holders) - set(chosen))
        come = sorted(set(chosen) - set(holders))
        holders = [come[gone.index(one)] if one in gone else one for one in holders] if holders else sorted(chosen)
        waiting = iter(holders)
        for source in pattern:
            yield next(waiting) if source == len(weights) else source


def _parts_of_a_block(weights: Sequence[Fraction], block: int) -> list[Fraction]:
    """The samples of each source in a block, exact or in 65,536ths."""
    parts = [block * weight / sum(weights) for weight in weights]
    if math.lcm(*(part.denominator for part in parts)) <= FINEST:
        return parts
    down = [math.floor(part * FINEST) for part in parts]
    by_rest = sorted(range(len(parts)), key=lambda source: (down[source] - parts[source] * FINEST, source))
    for source in by_rest[: block * FINEST - sum(down)]:
        down[source] += 1
    return [Fraction(units, FINEST) for units in down]


def _fair(rates: Sequence[Fraction], processors: int) -> Iterator[list[int]]:
    """PD2 slot by slot: the tasks with the earliest deadlines; among equals those whose next window overlaps theirs,
    then those with the latest group deadline."""
    done = [0] * len(rates)
    slot = 0
    while True:
        keys = []
        for task, rate in enumerate(rates):
            if rate and math.floor(done[task] / rate) <= slot:
                number = done[task] + 1
                overlaps = (number / rate).denominator > 1
                group = _group_deadline(rate, number) if overlaps and rate >= Fraction(1, 2) else 0
                keys.append((math.ceil(number / rate), not overlaps, -group, task))
        chosen = sorted(task for *_, task in sorted(keys)[:processors])
        for task in chosen:
            done[task] += 1
        yield chosen
        slot += 1


def _group_deadline(rate: Fraction, number: int) -> int:
    """The first time from the deadline on that is a deadline without overlap, or one slot before that of a window of
    three slots."""
    at = number
    while True:
        deadline = math.ceil(at / rate)
        if (at / rate).denominator == 1:
            return deadline
        if at > number and deadline - math.floor((at - 1) / rate) == 3:
            return deadline - 1
        at += 1


class _PlacesInMixture(Places):
    """The places of one source: whatever sample of the mixture is asked for."""

    def __init__(self, mixture: DefinedMixture, size_held_out: int) -> None:
        self.mixture, self.size_held_out = mixture, max(1, size_held_out)

    def training(self, counter: int) -> int:
        return self.mixture.place_of(counter)[1]

    def held_out(self, number: int) -> int:
        return self.mixture.numbered(number, held_out=True)[1] % self.size_held_out


class CorpusReader(Source, Protocol):
    """The oracle's reader of one corpus, whose places can be told to it."""

    places: Places


class MixtureSource:
    """Samples of several sources."""

    def __init__(self, job: Job, readers: Mapping[str, CorpusReader]) -> None:
        sizes = {name: reader.places.size for name, reader in readers.items()}
        self.mixture = DefinedMixture(job, sizes)
        self.readers = [readers[name] for name in self.mixture.names]
        held_out = [reader.validation_size for reader in self.readers]
        self.validation_size = sum(held_out) if all(held_out) else 0
        for reader, size in zip(self.readers, held_out, strict=True):
            reader.places = _PlacesInMixture(self.mixture, size)

    def rows(self, counters: Sequence[int]) -> Rows:
        """Return the samples of these counters."""
        singles = [self.readers[self._source_of(counter)].rows([counter]) for counter in counters]
        first = singles[0]
        inputs = {name: torch.cat([row.inputs[name] for row in singles]) for name in first.inputs}
        names = ("labels", "documents", "completions", "filled")
        labels, *others = (_joined([getattr(row, name) for row in singles]) for name in names)
        return Rows(inputs, labels, list(counters), *others)

    def _source_of(self, counter: int) -> int:
        is_held_out = counter >= EVALUATION
        return self.mixture.numbered(counter - EVALUATION if is_held_out else counter, is_held_out)[0]


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    given = [part for part in parts if part is not None]
    return torch.cat(given) if given else None
