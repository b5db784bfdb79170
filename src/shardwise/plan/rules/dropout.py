"""Rules about dropout."""

from __future__ import annotations

from shardwise.plan.rules.model import model_from_factory
from shardwise.plan.rules.rule import Rule, idle

# fmt: off
RULES: tuple[Rule, ...] = (
    idle("factory-dropout", "model.dropout", "a module of model.factory has no config in which to set it",
          model_from_factory, "leave it out and set it in the factory"),
)
# fmt: on
