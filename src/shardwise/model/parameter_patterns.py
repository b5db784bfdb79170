"""Parameters of a model that a job chooses by patterns of their names: frozen ones, and groups. Plain data."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from shardwise.job.optimizer_section import ParameterGroup
from shardwise.model.facts import ModelFacts


def with_frozen(facts: ModelFacts, patterns: Sequence[str]) -> ModelFacts:
    """Return `facts` with the parameters that one of `patterns` matches frozen, beside those that are already."""
    matched = {name for pattern in patterns for name in matching_parameters(facts, pattern)}
    return replace(facts, frozen=facts.frozen | matched) if matched else facts


def groups_of_parameters(facts: ModelFacts, groups: Sequence[ParameterGroup]) -> dict[str, ParameterGroup]:
    """Return the trained parameters that are in one of `groups`, each with its group."""
    return {name: group for group in groups for name in trained_parameters_of(facts, group)}


def trained_parameters_of(facts: ModelFacts, group: ParameterGroup) -> list[str]:
    """Return the trained parameters that a pattern of `group` matches, each once."""
    matched = (name for pattern in group.parameters for name in matching_parameters(facts, pattern))
    return [name for name in dict.fromkeys(matched) if name not in facts.frozen]


def matching_parameters(facts: ModelFacts, pattern: str) -> list[str]:
    """Return the parameters of which `pattern` matches the whole name, or that of a module that holds them.

    A tied parameter has several names; any of them counts.
    """
    aliases = {names[0]: names for names in facts.ties}
    expression = re.compile(pattern)
    return [
        name
        for name in facts.parameter_shapes
        if any(expression.fullmatch(prefix) for alias in aliases.get(name, (name,)) for prefix in _prefixes(alias))
    ]


def modules_of(facts: ModelFacts) -> list[str]:
    """Return the names of all modules that hold a parameter, themselves or below."""
    return sorted({prefix for name in facts.parameter_shapes for prefix in _prefixes(name.rpartition(".")[0])})


def _prefixes(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[:end]) for end in range(1, len(parts) + 1))
