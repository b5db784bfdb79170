"""Any module: with `model.loss`, or with a forward that returns its own mean loss."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from shardwise.data.batch import Batch, can_be_ignored
from shardwise.errors import ModelError
from shardwise.job.tasks import IGNORED
from shardwise.parallel.objective import Objective
from shardwise.training.objectives.own_loss import LossFunction, call_loss


class OwnModule(Objective):
    """A user's module and its loss: a function of output and batch, or the forward's own mean loss.

    The mean is the output itself, its `.loss` or its first item.

    Args:
        loss: the function, if there is one.
        compute: dtype of float arguments of the forward.
        cast_arguments: those of them that are cast to it; unset: all.
    """

    def __init__(
        self, loss: LossFunction | None, compute: torch.dtype, cast_arguments: Collection[str] | None = None
    ) -> None:
        self.function, self.compute, self.cast_arguments = loss, compute, cast_arguments
        self.needs_whole_batches = loss is None  # a mean over real and padding rows cannot be taken apart again

    def inputs(self, microbatch: Batch) -> dict[str, Any]:
        """Return the batch's inputs, with its labels if the module computes the loss; floats are cast."""
        inputs = microbatch.arguments()
        if self.function is None and microbatch.labels is not None:
            inputs["labels"] = _some_counted(microbatch.labels)
        return {name: value.to(self.compute) if self._is_cast(name, value) else value for name, value in inputs.items()}

    def _is_cast(self, name: str, value: Tensor) -> bool:
        return value.is_floating_point() and (self.cast_arguments is None or name in self.cast_arguments)

    def loss(self, microbatch: Batch, output: Any) -> tuple[Tensor, Tensor]:
        """Return the user's (sum, count), or mean times count."""
        if self.function is not None:
            return call_loss(self.function, output, microbatch, "model.loss")
        count = microbatch.count()
        return own_loss(output) * count, count


def _some_counted(labels: Tensor) -> Tensor:
    """Return the labels, or others where none of them counts: a mean over none would be no number.

    The count of 0 takes it out of the step.
    """
    if not can_be_ignored(labels):
        return labels
    return torch.where((labels == IGNORED).all(), labels.clamp(min=0), labels)


def own_loss(output: Any) -> Tensor:
    """Return the mean loss that a forward has returned.

    Raises:
        ModelError: there is none.
    """
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, dict):
        loss = output.get("loss")
    if loss is None and isinstance(output, (tuple, list)):
        loss = output[0]
    loss = output if loss is None else loss
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        raise ModelError(
            "the module's forward returns neither a 0-dim loss nor an object with .loss; give "
            "model.loss=package.module:function(output, batch) -> (sum, count)"
        )
    return loss
