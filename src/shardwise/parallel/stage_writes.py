"""Writes of parameters between the forward and the backward of a microbatch on a stage.

A schedule runs the forward of later microbatches before the backward of an earlier one, which then reads what they have
written; in one process each backward follows its forward. Autograd sees writes in place, but for those by `.data`.
"""

from __future__ import annotations

from torch import Tensor, nn

from shardwise.errors import ModelError
from shardwise.model.value_sums import is_other, value_sum


class StageWrites:
    """Sums of a stage's parameters at the end of each microbatch's forward, until its backward."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._sums: dict[int, dict[str, Tensor | None]] = {}

    def after_forward(self, microbatch: int) -> None:
        """Note the parameters that the backward of `microbatch` has to find."""
        self._sums[microbatch] = self._sum_parameters()

    def before_backward(self, microbatch: int) -> None:
        """Compare the parameters with those of the forward.

        Raises:
            ModelError: a later microbatch has written one.
        """
        now = self._sum_parameters()
        for name, total in self._sums.pop(microbatch, {}).items():
            if is_other(now[name], total):
                raise ModelError(
                    f"the forward of a later microbatch writes the parameter {name} by `.data`, and the backward of "
                    f"microbatch {microbatch} would read it: a pipeline runs forwards ahead. Keep what the forward "
                    "writes in a buffer, change the parameter in a callback after the step, or train with "
                    "parallel.pipeline_parallel_degree 1"
                )

    def _sum_parameters(self) -> dict[str, Tensor | None]:
        return {name: value_sum(value) for name, value in self.model.named_parameters()}
