"""The output projection inside the loss, so that logits never exist whole (kernels/loss.py)."""

from __future__ import annotations

from shardwise.model.facts import ModelFacts
from shardwise.parallel.builder import BuildInputs, ModelBuilder, Transform
from shardwise.parallel.deferred_head import DeferredHead
from shardwise.plan.plan import Plan


class HeadInLoss(Transform):
    """The head of the last stage returns its input; the loss multiplies, a chunk of rows at a time."""

    name = "loss"

    def applies(self, plan: Plan, facts: ModelFacts) -> bool:
        return plan.chunked_loss and bool(facts.head)

    def apply(self, build: ModelBuilder, inputs: BuildInputs) -> None:
        head = inputs.facts.head
        assert head is not None
        for stage in build.stages:
            if stage.is_last:
                stage.head = DeferredHead(stage.model.get_submodule(head), stage.vocabulary)
