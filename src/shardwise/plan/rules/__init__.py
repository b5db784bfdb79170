"""Legal combinations of a job: one table, read by `resolve`, by the reference page and by the tests.

A row says which keys take part, what has to hold, when it is broken and what to do. The message is made from the
values of the keys, so that it always holds key, value, rule and the nearest fix. Rows are judged in order and the first
broken one is raised; a row may therefore rely on those above it. Each file holds the rows of one subject. The rows of a
transform stand under its name in `shardwise.parallel.transforms`.
"""

from __future__ import annotations

from typing import NamedTuple

from shardwise.errors import LegalityError
from shardwise.job.axes import Axis
from shardwise.plan.draft import Draft, UnknownFacts
from shardwise.plan.rules import (
    adapters,
    attention,
    checkpoint,
    checkpointing,
    compile,
    context,
    data,
    dropout,
    dtypes,
    evaluation,
    expert,
    file_rows,
    float8,
    freeze,
    fused_kernels,
    loss,
    model,
    observe,
    offload,
    optimizer,
    packed_base,
    parallel,
    routers,
    sequence,
    sequence_lengths,
    sharding,
    stages,
    tensor,
    traced_stages,
    training,
    weight_gradients,
)
from shardwise.plan.rules.rule import Rule

# The rules of each axis, in the order in which they are judged.
AXIS_RULES: dict[Axis, tuple[Rule, ...]] = {
    Axis.TENSOR: (*tensor.RULES, *sequence.RULES),
    Axis.CONTEXT: context.RULES,
    Axis.REPLICA: (),
    Axis.SHARD: sharding.RULES,
    Axis.EXPERT: (*expert.RULES, *routers.RULES),
    Axis.PIPELINE: (*stages.RULES, *traced_stages.RULES, *weight_gradients.RULES),
}
RULES: tuple[Rule, ...] = (
    *model.RULES,
    *freeze.RULES,
    *adapters.RULES,
    *packed_base.RULES,
    *attention.RULES,
    *dropout.RULES,
    *compile.RULES,
    *fused_kernels.RULES,
    *data.RULES,
    *file_rows.RULES,
    *parallel.RULES,
    *training.RULES,
    *sequence_lengths.RULES,
    *(rule for rules_of_axis in AXIS_RULES.values() for rule in rules_of_axis),
    *checkpointing.RULES,
    *offload.RULES,
    *loss.RULES,
    *dtypes.RULES,
    *float8.RULES,
    *optimizer.RULES,
    *evaluation.RULES,
    *observe.RULES,
    *checkpoint.RULES,
)


class RuleDoc(NamedTuple):
    """A row as the reference page shows it."""

    id: str
    keys: tuple[str, ...]
    sentence: str
    fix: str


def check(draft: Draft) -> None:
    """Raise LegalityError for the first broken row; rows that ask a model that is not known yet are left for later."""
    for rule in RULES:
        try:
            broken = rule.when(draft)
        except UnknownFacts:
            continue
        if broken:
            raise LegalityError(rule.message(draft), rule.id)


def rules() -> list[RuleDoc]:
    """All rows, in the order in which they are judged."""
    return [RuleDoc(rule.id, rule.keys, rule.sentence, rule.fix) for rule in RULES]
