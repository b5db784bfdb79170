"""The reference model of a preference loss: what the model was before it was trained, on every layout.

Under adapters it is the trained model with the adapters off, which costs no memory. Else it is a frozen copy, sharded
as the trained model is. Either way one forward of all microbatches goes ahead of a step, in evaluation mode, on the
ranks and in the stages in which the step itself runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from torch import Tensor

from shardwise.data.batch import Batch
from shardwise.kernels.adapters import adapters_off
from shardwise.model.build import build_model
from shardwise.parallel.apply import parallelize
from shardwise.parallel.builder import Allocation
from shardwise.parallel.model import ParallelModel
from shardwise.parallel.objective import Objective
from shardwise.plan.plan import Plan

COPY, PRECOMPUTED = "copy", "precomputed"  # of `Plan.reference`


def needs_copy(plan: Plan) -> bool:
    """Return whether the reference is a model of its own."""
    return plan.reference == COPY


def frozen_copy(model: ParallelModel, allocation: Allocation = nullcontext) -> ParallelModel:
    """Return the job's model once more, sharded like `model` and without gradients; it has no values yet. Collective.

    Args:
        allocation: surrounds what gives parameters and buffers their storage.
    """
    facts = replace(model.facts, frozen=frozenset(model.facts.parameter_shapes))
    return parallelize(build_model(model.plan.job), model.plan, model.layout, facts, model.device, allocation)


class FrozenReference:
    """The reference on this rank.

    Args:
        model: the frozen copy; or the trained model, whose adapters are off while it is the reference.
    """

    def __init__(self, model: ParallelModel) -> None:
        self.model = model

    def annotated(
        self,
        objective: Objective,
        microbatches: Sequence[Batch],
        step: int,
        log_probabilities: Callable[[Batch, Any], Tensor],
    ) -> list[Batch]:
        """Return the microbatches of a step with the reference's log-probabilities, on the last stage. Collective.

        Args:
            objective: what gives the model its inputs.
            log_probabilities: (microbatch as far as it is here, output) -> those of its completions, [B, C].
        """
        results: list[Tensor] = []

        def keep(microbatch: Batch, output: Any) -> None:
            results.append(log_probabilities(microbatch, output))

        mode = self.model.module.training
        self.model.train(False)
        with adapters_off(part.module for part in self.model.parts):
            self.model.run_ahead(objective, microbatches, step, keep)
        self.model.train(mode)
        if not results:  # another stage is the last
            return list(microbatches)
        return [replace(microbatch, reference=result) for microbatch, result in zip(microbatches, results, strict=True)]
