"""The training loss that can be put beside a validation loss: a step alone is a sample of a few sequences."""

from __future__ import annotations

from collections import deque

from shardwise.training.step import StepResult


class RecentLoss:
    """Mean loss of the counted labels of the last `most` steps, without those that were skipped."""

    def __init__(self, most: int) -> None:
        self._steps: deque[StepResult] = deque(maxlen=most)

    def add(self, result: StepResult) -> None:
        """Take in a step."""
        if not result.skipped:
            self._steps.append(result)

    @property
    def steps(self) -> int:
        """Number of steps that the mean is of."""
        return len(self._steps)

    @property
    def mean(self) -> float | None:
        """Nats a label; None before the first step."""
        labels = sum(result.count for result in self._steps)
        return sum(result.loss * result.count for result in self._steps) / labels if labels else None
