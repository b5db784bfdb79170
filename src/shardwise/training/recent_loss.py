"""The training loss that can be put beside a validation loss: a step alone is a sample of a few sequences."""

from __future__ import annotations

from collections import deque

from shardwise.training.step import StepResult


class RecentLoss:
    """Mean loss of the last `most` steps together, without those that were skipped.

    It is a mean of the same things as a step's own loss: counted labels, samples or pairs.
    """

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
        """Nats; None before the first step."""
        divisor = sum(result.divisor for result in self._steps)
        return sum(result.loss * result.divisor for result in self._steps) / divisor if divisor else None
