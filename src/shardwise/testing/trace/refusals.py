"""Refusals, by name, of jobs that a trace cannot see."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from shardwise._torch_compat.tracing import asks_for_values
from shardwise.errors import ConfigError, UserCodeError
from shardwise.job.objects import in_parentheses, raised_at
from shardwise.model.facts import ModelFacts
from shardwise.plan.plan import Plan
from shardwise.testing.simulated.streams import SIMULATED

INSTEAD = "leave it out, or take the closed form of `shardwise plan`"

REFUSALS: tuple[tuple[Callable[[Plan, ModelFacts], Any], str], ...] = (
    (
        lambda plan, facts: plan.stages and facts.stages.towers,
        "parallel.pipeline_parallel_degree above 1 where a model has a tower: a stage that does not hold it reads the "
        "batch to know what it would return",
    ),
)


def refuse_untraceable(plan: Plan, facts: ModelFacts) -> None:
    """Raise ConfigError for a job that the trace cannot follow; the message says which key."""
    for refuses, why in REFUSALS:
        if refuses(plan, facts):
            raise ConfigError(f"--trace cannot follow {why}; {INSTEAD}")


@contextmanager
def unseen_refused() -> Iterator[None]:
    """Name the place of code that needs what nobody knows here: values of tensors, or a device's own operator.

    Raises:
        ConfigError: with the file and the line that are not torch's or ours.
    """
    try:
        yield
    except (RuntimeError, UserCodeError) as error:
        cause = error.__cause__ if isinstance(error, UserCodeError) else error
        if cause is None:
            raise
        lacking = re.search(rf"Could not run '([\w:.]+)' with arguments from the '{SIMULATED}' backend", str(cause))
        if lacking:
            what = f"{lacking[1]}, which a device computes by code of its own"
        elif asks_for_values(cause):
            what = "code that asks for the values of tensors"
        else:
            raise
        raise ConfigError(f"--trace cannot follow {what}{in_parentheses(raised_at(cause))}; {INSTEAD}") from error
