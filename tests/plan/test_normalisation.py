"""What losses are divided by, in the plan's terms."""

from __future__ import annotations

import pytest

from shardwise.plan.normalisation import NORMALISATIONS, SAMPLE_MEAN, SMP_MEAN, TOKEN_MEAN, LossCounts


def test_tokens_count_alike_wherever_they_are() -> None:
    counts = LossCounts(tokens=40, microbatches=4, data_ranks=2)
    assert TOKEN_MEAN.seed(counts, loss_scale=8.0) == 0.2
    assert TOKEN_MEAN.mean(100.0, counts) == 2.5


def test_samples_count_alike_however_long_they_are() -> None:
    assert SAMPLE_MEAN.seed(LossCounts(tokens=40, samples=5), loss_scale=8.0) == 1.6
    assert SAMPLE_MEAN.mean(0.0, LossCounts(tokens=0, samples=0)) == 0.0


def test_a_step_without_a_token_divides_by_nothing() -> None:
    assert TOKEN_MEAN.seed(LossCounts(tokens=0), loss_scale=8.0) == 8.0
    assert TOKEN_MEAN.mean(0.0, LossCounts(tokens=0)) == 0.0


def test_smp_averages_means() -> None:
    assert SMP_MEAN.seed(LossCounts(tokens=40, microbatches=4, data_ranks=2), loss_scale=16.0) == 2.0


@pytest.mark.parametrize("name", ["token", "sample", "pair", "smp_mean"])
def test_the_plan_names_them(name: str) -> None:
    assert NORMALISATIONS[name].name == name
