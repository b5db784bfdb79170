"""The optimizer of each parameter: the job's, that of its group, or AdamW for what Muon leaves. Plain data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from shardwise.job.optimizer_section import OptimizerSection, ParameterGroup
from shardwise.model.facts import ModelFacts
from shardwise.model.matrices import is_hidden_matrix
from shardwise.model.parameter_patterns import groups_of_parameters
from shardwise.model.same_object import SameObject

MUON, REST = "Muon", "AdamW"


@dataclass(frozen=True)
class ParameterOptimizer:
    """An optimizer as one parameter has it.

    Attributes:
        name, options: as `optimizer.name` and `optimizer.options`.
        learning_rate: the peak.
        weight_decay: of tensors of two or more dims.
    """

    name: str
    options: Mapping[str, Any]
    learning_rate: float
    weight_decay: float

    @cached_property
    def kind(self) -> tuple[str, str]:
        """Equal for parameters that one optimizer of torch's updates: its name and options."""
        return self.name, json.dumps(dict(self.options), sort_keys=True, default=repr)


def optimizer_of(
    settings: OptimizerSection, group: ParameterGroup | None = None, rest: bool = False
) -> ParameterOptimizer:
    """Return the optimizer of a parameter in a group, or in none; `rest` is what Muon leaves to AdamW."""
    name, options = settings.name, settings.options
    rate, decay = settings.learning_rate, settings.weight_decay
    if rest:
        name, options, own = REST, settings.adamw.options, settings.adamw
        rate, decay = _set(own.learning_rate, rate), _set(own.weight_decay, decay)
    if group is not None and group.optimizer is not None:
        options = settings.options if group.optimizer == settings.name else {}
        name = group.optimizer
    if group is not None:
        options = options if group.options is None else group.options
        rate, decay = _set(group.learning_rate, rate), _set(group.weight_decay, decay)
    return ParameterOptimizer(name, options, rate, decay)


def _set(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value


def optimizers_of_parameters(facts: ModelFacts, settings: OptimizerSection) -> Mapping[str, ParameterOptimizer]:
    """Return the optimizer of every trained parameter, by name."""
    return _optimizers_of(SameObject(facts), SameObject(settings))


@lru_cache(maxsize=4)
def _optimizers_of(of_facts: SameObject, of_settings: SameObject) -> Mapping[str, ParameterOptimizer]:
    facts, settings = of_facts.value, of_settings.value
    groups = groups_of_parameters(facts, settings.groups)
    return {
        name: optimizer_of(settings, groups.get(name), settings.name == MUON and not is_hidden_matrix(facts, name))
        for name in facts.trained_shapes
    }
