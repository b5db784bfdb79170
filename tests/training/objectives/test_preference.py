"""The loss of a pair and its gradient, against the formulas of the papers."""

from __future__ import annotations

import math

import pytest
import torch

from shardwise.job.schema import DpoSection
from shardwise.training.objectives.preference import CompletionScores, loss_gradient, pair_losses, rewards

# Two pairs and what stands behind them; the second has no label of its rejected completion.
SCORES = CompletionScores(
    policy=torch.tensor([[-3.0, -8.0, -2.0, 0.0, 0.0, 0.0]], dtype=torch.float64),
    reference=torch.tensor([[-4.0, -6.0, -1.0, 0.0, 0.0, 0.0]], dtype=torch.float64),
    lengths=torch.tensor([[2.0, 4.0, 3.0, 0.0, 0.0, 0.0]], dtype=torch.float64),
)
MARGIN = (-3.0 + 4.0) - (-8.0 + 6.0)
MEAN_MARGIN = (-3.0 + 4.0) / 2 - (-8.0 + 6.0) / 4


def log_sigmoid(value: float) -> float:
    return -math.log1p(math.exp(-value))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, -log_sigmoid(0.1 * MARGIN)),
        ({"beta": 2.0}, -log_sigmoid(2 * MARGIN)),
        ({"label_smoothing": 0.2}, -0.8 * log_sigmoid(0.1 * MARGIN) - 0.2 * log_sigmoid(-0.1 * MARGIN)),
        ({"loss": "ipo"}, (MARGIN - 5.0) ** 2),
        ({"length_normalised": True}, -log_sigmoid(0.1 * MEAN_MARGIN)),
        ({"loss": "ipo", "beta": 0.5, "length_normalised": True}, (MEAN_MARGIN - 1.0) ** 2),
    ],
)
def test_losses_are_those_of_the_papers(settings: dict[str, object], expected: float) -> None:
    losses = pair_losses(SCORES, DpoSection.model_validate(settings))
    assert losses.shape == (1, 3)
    assert losses[0].tolist() == pytest.approx([expected, 0.0, 0.0], abs=1e-12)


def test_the_gradient_pushes_the_completions_of_a_pair_apart() -> None:
    gradient = loss_gradient(SCORES, DpoSection(beta=0.5))[0].tolist()
    slope = -0.5 / (1 + math.exp(0.5 * MARGIN))
    assert gradient == pytest.approx([slope, -slope, 0.0, 0.0, 0.0, 0.0], abs=1e-12)


def test_rewards_are_summed_over_pairs() -> None:
    assert rewards(SCORES, DpoSection(beta=0.5)).tolist() == pytest.approx([0.5, -1.0, 1.0])
