"""The source of each sample: shares of any 1,000 samples, counts at any sample, equal to the oracle's own reading."""

from __future__ import annotations

import pickle
import random
from itertools import accumulate

import numpy as np
import pytest

from shardwise.data.shares import FINEST, Assignment, Shares, fair_sets, whole_numbers

CASES = [pytest.param(seed, marks=[] if seed < 2 else pytest.mark.slow) for seed in range(14)]


def drawn_weights(rng: random.Random) -> list[float]:
    kinds = [
        lambda: rng.randint(1, 20),
        lambda: round(rng.random(), 3) + 0.001,
        lambda: rng.random() ** 4 + 1e-6,
    ]
    return [rng.choice(kinds)() for _ in range(rng.randint(2, 9))]


@pytest.mark.parametrize("seed", CASES)
def test_any_thousand_samples_hold_the_shares(seed: int) -> None:
    rng = random.Random(seed)
    weights = whole_numbers(drawn_weights(rng) if seed else [1, 2, 4])
    shares, count = Shares(weights), 3200
    # The second start is around the end of a period, whose open places have changed hands.
    for start in (0, max(0, 1000 * shares.fineness * 2 - 1600) if shares.fineness < 300 else 777_000):
        sources = np.array([shares.source_of(start + number) for number in range(count)])
        for source, weight in enumerate(weights):
            read = np.concatenate([[0], np.cumsum(sources == source)])
            share = weight / sum(weights)
            assert np.abs(read[1000:] - read[:-1000] - 1000 * share).max() < 1 + 1e-9
            assert np.abs(read + shares.counts(start)[source] - share * np.arange(start, start + count + 1)).max() < 3
            for number in rng.sample(range(count), 20):
                assert shares.counts(start + number)[source] == shares.counts(start)[source] + read[number]


@pytest.mark.parametrize("seed", range(3))
def test_sets_are_less_than_one_off_the_rates(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(25):
        period = rng.randint(3, 40)
        rates = [rng.randint(1, period - 1) for _ in range(rng.randint(1, 8))]
        rates += [period - sum(rates) % period] if sum(rates) % period else []
        done = [0] * len(rates)
        for slot, chosen in enumerate(fair_sets(rates, period, sum(rates) // period), start=1):
            for task in chosen:
                done[task] += 1
            assert all(abs(count * period - rate * slot) < period for count, rate in zip(done, rates, strict=True))
        assert done == rates


def test_weights_of_many_digits_are_taken_to_one_in_65_million() -> None:
    shares = Shares(whole_numbers([0.123456789, 0.876543211]))
    assert shares.fineness == FINEST
    assert abs(shares.counts(1_000_000)[0] - 123_456.789) < 1
    assert Shares(whole_numbers([0.3, 0.7])).fineness == 1
    assert whole_numbers([0.1, 0.25, 0]) == [2, 5, 0]
    copy = pickle.loads(pickle.dumps(shares))
    assert [copy.source_of(number) for number in range(50)] == [shares.source_of(number) for number in range(50)]


@pytest.mark.parametrize("samples", [[7, 130, 3], [1500, 20, 1, 900], [1000, 1000]])
def test_an_epoch_holds_its_passes(samples: list[int]) -> None:
    assignment, size = Assignment.of_epoch(samples), sum(samples)
    for epoch in (1, 2):
        assert assignment.counts(epoch * size) == [epoch * count for count in samples]
    sources = [assignment.source_of(number) for number in range(2 * size)]
    assert sources[:size] == sources[size:]
    assert [sources[:size].count(source) for source in range(len(samples))] == samples


def test_every_stretch_begins_with_its_own_weights() -> None:
    assignment = Assignment.of_weights([(0, [1, 0]), (100, [1, 3]), (1100, [0, 1])])
    sources = [assignment.source_of(number) for number in range(1500)]
    assert (sources[:100], sources[1100:]) == ([0] * 100, [1] * 400)
    assert sources[100:1100].count(0) == 250
    totals = list(accumulate((source == 1 for source in sources), initial=0))
    assert [assignment.counts(number)[1] for number in range(1501)] == totals
