"""The protocol of an objective: what a microbatch gives the model, and what its loss is.

Language modelling, a module's own loss, preference and a user's own loss are objectives; `ParallelModel.run` is the one
door through which they reach forward and backward, with or without a pipeline. Those of jobs are under
training/objectives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor


class Microbatch(Protocol):
    """The part of a microbatch that `ParallelModel.run` itself reads; objectives read the rest."""

    rows: Tensor  # [B] int64 global sample counters


class Objective(Protocol):
    """Inputs and loss of the model in a step.

    Losses are sums: `Normalisation` (plan/normalisation.py) divides them, once. Without gradients (evaluation) an
    objective leaves out what is added for training alone.

    Attributes:
        needs_whole_batches: the loss cannot leave padding rows out, so there must be none.
    """

    needs_whole_batches: bool

    def prepared(self, microbatches: Sequence[Any], step: int) -> Sequence[Any]:
        """Return the microbatches of a step with what their losses need besides. Collective, ahead of the forwards."""
        return microbatches

    def inputs(self, microbatch: Any) -> dict[str, Any]:
        """Return the keyword arguments of the model's forward."""
        ...

    def loss(self, microbatch: Any, output: Any) -> tuple[Tensor, Tensor]:
        """Return (summed loss, count of what was summed), both 0-dim, of the model's output on the last stage."""
        ...

    def measured(self) -> Tensor | None:
        """Return sums [K] over what this rank's losses have counted since the last call; None without any.

        K is the same on every rank. Sums of ranks that compute the same loss count once.
        """
        return None

    def metrics(self, sums: Sequence[float], count: float) -> Mapping[str, float]:
        """Return numbers by name, of the `measured` sums of all ranks and of what their losses counted."""
        return {}
