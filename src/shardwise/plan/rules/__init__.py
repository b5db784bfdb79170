"""Which combinations of a job can run: one table, read by `resolve`, by the reference page and by the tests.

A row says which keys take part, what has to hold, when it is broken and what to do. The message is made from the
values of the keys, so that it always holds key, value, rule and the nearest fix. Rows are judged in order and the first
broken one is raised; a row may therefore rely on those above it.
"""

from __future__ import annotations

from typing import NamedTuple

from shardwise.errors import LegalityError
from shardwise.plan.draft import Draft, UnknownFacts
from shardwise.plan.rules import pipeline, running, structure
from shardwise.plan.rules.rule import Rule

RULES: tuple[Rule, ...] = (
    *structure.MODEL_RULES,
    *structure.DATA_RULES,
    *structure.PARALLEL_RULES,
    *structure.MEMORY_RULES,
    *running.PRECISION_RULES,
    *running.OPTIMIZER_RULES,
    *running.BATCH_RULES,
    *pipeline.PIPELINE_RULES,
    *running.CHECKPOINT_RULES,
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
