"""The training loss beside a validation loss: the mean over the labels of the last steps."""

from __future__ import annotations

import pytest

from shardwise.training.recent_loss import RecentLoss
from shardwise.training.step import StepResult


def test_the_last_steps_count_by_their_labels() -> None:
    recent = RecentLoss(2)
    assert (recent.mean, recent.steps) == (None, 0)
    for loss, count, skipped in [(9.0, 100, False), (4.0, 10, False), (float("nan"), 10, True), (1.0, 30, False)]:
        recent.add(StepResult(loss, 1.0, count, skipped, 1.0))
    assert recent.mean == pytest.approx((40 + 30) / 40)
    assert recent.steps == 2
