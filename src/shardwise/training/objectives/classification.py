"""Classes of samples or tokens: the cross-entropy of a head of classes, with accuracy and F1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.data.batch import Batch
from shardwise.job.devices import widest_float
from shardwise.job.tasks import IGNORED
from shardwise.parallel.model import ParallelModel
from shardwise.training.objectives.language_modelling import LanguageModelling


class Classification(LanguageModelling):
    """Cross-entropy of classes, as that of tokens; it also counts which classes are predicted."""

    def __init__(self, model: ParallelModel) -> None:
        super().__init__(model)
        config: Any = model.module.config
        self.classes = int(config.num_labels)
        self._counts = self._no_counts()

    def _no_counts(self) -> Tensor:
        """Return zeros [3, classes]: of each class right predictions, labels and predictions."""
        return torch.zeros(3, self.classes, dtype=widest_float(self.model.device), device=self.model.device)

    def loss(self, microbatch: Batch, output: Any) -> tuple[Tensor, Tensor]:
        """Return (summed cross-entropy in nats, counted labels), and count the classes."""
        assert microbatch.labels is not None
        is_counted = (microbatch.labels != IGNORED).flatten()
        labels = microbatch.labels.flatten().clamp(min=0)
        predicted = output.logits.detach().argmax(-1).flatten()
        # Sums with zeros in them: to take the counted ones out, the host would have to know how many there are.
        ones = is_counted.to(self._counts.dtype)
        right, labelled, guessed = (labels, ones * (labels == predicted)), (labels, ones), (predicted, ones)
        for place, (classes, numbers) in enumerate((right, labelled, guessed)):
            self._counts[place].index_add_(0, classes, numbers)
        return super().loss(microbatch, output)

    def measured(self) -> Tensor:
        """Return the counts [3 * classes] since the last call."""
        counts, self._counts = self._counts, self._no_counts()
        return counts.flatten()

    def metrics(self, sums: Sequence[float], count: float) -> Mapping[str, float]:
        """Return accuracy, and the mean F1 of the classes that occur (macro)."""
        return accuracy_and_f1(torch.tensor(sums, dtype=torch.float64).view(3, -1))


def accuracy_and_f1(counts: Tensor) -> dict[str, float]:
    """Return the share of right predictions, and the mean F1 of the classes that occur.

    Args:
        counts: [3, classes], right predictions, labels and predictions of each. F1 of a class is twice the first over
            the sum of the others.
    """
    right, labelled, predicted = counts
    occurs = labelled + predicted > 0
    scores = 2 * right[occurs] / (labelled + predicted)[occurs]
    accuracy = float(right.sum() / labelled.sum().clamp(min=1))
    return {"accuracy": accuracy, "f1": float(scores.mean()) if len(scores) else 0.0}
