"""The training loss beside a validation loss: the mean over what the losses of the last steps are means of."""

from __future__ import annotations

import pytest

from shardwise.training.recent_loss import RecentLoss
from shardwise.training.step import StepResult


def test_the_last_steps_count_by_what_they_are_means_of() -> None:
    recent = RecentLoss(2)
    assert (recent.mean, recent.steps) == (None, 0)
    for loss, samples, skipped in [(9.0, 100, False), (4.0, 10, False), (float("nan"), 10, True), (1.0, 30, False)]:
        recent.add(StepResult(loss, 1.0, 500 // samples, samples, skipped, 1.0))
    assert recent.mean == pytest.approx((40 + 30) / 40)
    assert recent.steps == 2
