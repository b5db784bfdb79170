"""The rule that gives each sample of a mixture its source: a pure function of the weights and the sample's number.

Exact definition. The sources, sorted by name, have the shares w, and a block is 1,000 samples. A share in a block is
taken to 1 / M: e = 1000 * M * w, with M = A / gcd(1000, A) for weights that are whole numbers of sum A, so that nothing
is rounded; where that M is above `FINEST`, M is `FINEST`, e is rounded down and the largest remainders up. With
(n, f) = divmod(e, M) a source has n samples in every block and one more in f of M blocks; F = sum(f) / M have one more
in each.

`fair_sets` says in which. It is PD2 (Anderson and Srinivasan, Mixed Pfair/ERfair scheduling of asynchronous periodic
tasks, ECRTS 2001), with sources for tasks, blocks for slots of time, and F processors: the proportionate progress of
Baruah, Cohen, Plaxton and Varvel (Algorithmica 15, 1996), by which after any number of blocks every source is less than
one sample off its share. The same for one processor and 1,000 slots of time spreads the n of each source, and F open
places, over the block. In the first block open place p belongs to the p-th source of its set; a source that is in the
next set too keeps its place, and the p-th of those that are new to it takes the place of the p-th that has left.

So any 1,000 samples in a row hold each place of a block once, and a source has one of the open ones or none: it has n
or n + 1 of them, which is never a whole sample off its share, for any number of sources. (Words in which that holds
for windows of every length do not exist for most weights of three and more letters: Fraenkel's conjecture.)
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, pairwise
from math import gcd, lcm

BLOCK = 1000
FINEST = 1 << 16  # a weight is taken to 1 / 65,536,000 of all where whole numbers do not give it exactly


def fair_sets(rates: Sequence[int], period: int, picks: int) -> Iterator[tuple[int, ...]]:
    """Yield for each of `period` slots the numbers of the `picks` tasks that have it, ascending.

    Task i has rates[i] slots of the period, at most all of them; the rates add up to picks * period.
    """
    done = [0] * len(rates)

    def urgency(task: int) -> tuple[int, bool, int, int]:
        rate, number = rates[task], done[task] + 1
        deadline, rest = ceiling(number * period, rate), period - rate
        overlaps = bool(number * period % rate)
        group = ceiling(ceiling(deadline * rest, period) * period, rest) if overlaps and 2 * rate >= period else 0
        return deadline, not overlaps, -group, task

    for slot in range(period):
        ready = [task for task, rate in enumerate(rates) if rate and done[task] * period // rate <= slot]
        chosen = sorted(sorted(ready, key=urgency)[:picks])
        for task in chosen:
            done[task] += 1
        yield tuple(chosen)


def ceiling(number: int, divisor: int) -> int:
    """Return the quotient, rounded up."""
    return -(-number // divisor)


def whole_numbers(weights: Sequence[float]) -> list[int]:
    """Return the same ratios in whole numbers without a common divisor; each number counts as it is written."""
    exact = [Fraction(str(weight)) for weight in weights]
    scale = lcm(*(weight.denominator for weight in exact))
    scaled = [int(weight * scale) for weight in exact]
    return [number // (gcd(*scaled) or 1) for number in scaled]


class Shares:
    """The source of each sample, for weights in whole numbers; `block` is what a window holds."""

    def __init__(self, weights: Sequence[int], block: int = BLOCK) -> None:
        self.weights, self.block, self.sources = tuple(weights), block, len(weights)
        self.fineness, exact = _units(weights, block)
        self.fixed, self._rates = zip(*(divmod(unit, self.fineness) for unit in exact), strict=True)
        self.open = sum(self._rates) // self.fineness
        self._sets = fair_sets(self._rates, self.fineness, self.open)
        self._places: list[tuple[int, ...]] = []  # of each block so far: the source of each open place
        self._taken: list[tuple[int, ...]] = [(0,) * self.sources]  # open places of each source before each block

    def __reduce__(self) -> tuple[type[Shares], tuple[tuple[int, ...], int]]:
        return Shares, (self.weights, self.block)

    @cached_property
    def _pattern(self) -> list[int]:
        """The source of each place of a block; `sources` stands for an open one."""
        return [task for (task,) in fair_sets([*self.fixed, self.open], self.block, 1)]

    @cached_property
    def _positions(self) -> list[list[int]]:
        """The places of each source in the block, and those that are open."""
        places: list[list[int]] = [[] for _ in range(self.sources + 1)]
        for place, source in enumerate(self._pattern):
            places[source].append(place)
        return places

    def source_of(self, sample: int) -> int:
        """Return the number of the source that a sample is of."""
        block, place = divmod(sample, self.block)
        source = self._pattern[place]
        if source < self.sources:
            return source
        return self._open_places(block)[bisect_left(self._positions[-1], place)]

    def counts(self, samples: int) -> list[int]:
        """Return how many of the first so many samples are of each source."""
        block, place = divmod(samples, self.block)
        periods, inside = divmod(block, self.fineness)
        self._extend(inside)
        begun = self._open_places(block)[: bisect_left(self._positions[-1], place)] if self.open else ()
        return [
            block * self.fixed[source]
            + periods * self._rates[source]
            + self._taken[inside][source]
            + bisect_left(self._positions[source], place)
            + begun.count(source)
            for source in range(self.sources)
        ]

    def _open_places(self, block: int) -> tuple[int, ...]:
        """The source of each open place of a block."""
        periods, inside = divmod(block, self.fineness)
        self._extend(inside + 1)
        places = self._places[inside]
        return places if not periods else tuple(places[self._moved_from(place, periods)] for place in range(self.open))

    def _moved_from(self, place: int, periods: int) -> int:
        """The place of the first period whose sources have come to `place` after so many periods."""
        cycle = [place]
        while (origin := self._origins[cycle[-1]]) != place:
            cycle.append(origin)
        return cycle[periods % len(cycle)]

    @cached_property
    def _origins(self) -> list[int]:
        """For each open place of the first block after a period: the place that its source had in the very first."""
        self._extend(self.fineness)
        after = _moved(self._places[-1], tuple(sorted(self._places[0])))
        return [self._places[0].index(source) for source in after]

    def _extend(self, blocks: int) -> None:
        """Know the open places of the first so many blocks of a period."""
        while len(self._places) < blocks:
            chosen = next(self._sets)
            self._places.append(_moved(self._places[-1], chosen) if self._places else chosen)
            before = self._taken[-1]
            self._taken.append(tuple(count + (source in chosen) for source, count in enumerate(before)))


def _moved(places: tuple[int, ...], chosen: tuple[int, ...]) -> tuple[int, ...]:
    """Return the open places of the next block, in which the sources `chosen` have one."""
    leaving = sorted(set(places) - set(chosen))
    follower = dict(zip(leaving, sorted(set(chosen) - set(places)), strict=True))
    return tuple(follower.get(source, source) for source in places)


def _units(weights: Sequence[int], block: int) -> tuple[int, list[int]]:
    """Return (M, e of each source) of the definition above."""
    total = sum(weights)
    fineness = total // gcd(block, total)
    if fineness <= FINEST:
        return fineness, [block * fineness * weight // total for weight in weights]
    parts = [divmod(block * FINEST * weight, total) for weight in weights]
    left = block * FINEST - sum(whole for whole, _ in parts)
    largest = sorted(range(len(parts)), key=lambda source: (-parts[source][1], source))[:left]
    return FINEST, [whole + (source in largest) for source, (whole, _) in enumerate(parts)]


@dataclass(frozen=True)
class Stretch:
    """Samples from `start` on that are shared out by one set of weights."""

    start: int
    shares: Shares


class Assignment:
    """The source of every sample of a run: stretches with weights of their own, or epochs that hold whole passes.

    Every stretch begins anew with a block. An epoch of T samples, t of a source, is blocks by the weights t, and behind
    the last whole one a shorter block that gives each source what it lacks of its t.
    """

    def __init__(self, stretches: Sequence[Stretch], epoch: Sequence[int] = ()) -> None:
        self.stretches, self.epoch = tuple(stretches), tuple(epoch)
        lengths = [after.start - stretch.start for stretch, after in pairwise(stretches)]
        of_each = [stretch.shares.counts(length) for stretch, length in zip(stretches, lengths, strict=False)]
        zero = [0] * stretches[0].shares.sources
        self._before = list(accumulate(of_each, _sums, initial=zero))

    @classmethod
    def of_weights(cls, weights: Sequence[tuple[int, Sequence[float]]]) -> Assignment:
        """Share out by weights from each of some samples on, the first of which is 0."""
        return cls([Stretch(start, Shares(whole_numbers(values))) for start, values in weights])

    @classmethod
    def of_epoch(cls, samples: Sequence[int]) -> Assignment:
        """Share out epochs that hold so many samples of each source."""
        shares, total = Shares(samples), sum(samples)
        start = total // BLOCK * BLOCK
        if start == total:
            return cls([Stretch(0, shares)], samples)
        lacking = [whole - count for whole, count in zip(samples, shares.counts(start), strict=True)]
        last = Stretch(start, Shares(lacking, total - start))
        return cls([Stretch(0, shares), last] if start else [last], samples)

    @property
    def sources(self) -> int:
        """The number of sources."""
        return self.stretches[0].shares.sources

    def source_of(self, sample: int) -> int:
        """Return the number of the source that a sample is of."""
        inside = sample % sum(self.epoch) if self.epoch else sample
        stretch = self.stretches[self._number(inside)]
        return stretch.shares.source_of(inside - stretch.start)

    def counts(self, samples: int) -> list[int]:
        """Return how many of the first so many samples are of each source."""
        epochs, inside = divmod(samples, sum(self.epoch)) if self.epoch else (0, samples)
        number = self._number(inside)
        stretch = self.stretches[number]
        counts = _sums(self._before[number], stretch.shares.counts(inside - stretch.start))
        return _sums(counts, [epochs * count for count in self.epoch]) if epochs else counts

    def _number(self, sample: int) -> int:
        return bisect_right(self.stretches, sample, key=lambda stretch: stretch.start) - 1


def _sums(some: Sequence[int], others: Sequence[int]) -> list[int]:
    return [one + other for one, other in zip(some, others, strict=True)]
