"""Refusals, by name, of jobs that a trace cannot see."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from shardwise._torch_compat.tracing import asks_for_values
from shardwise.errors import ConfigError
from shardwise.job.objects import in_parentheses, raised_at
from shardwise.job.tasks import TASKS
from shardwise.model.facts import ModelFacts
from shardwise.plan.plan import Plan

INSTEAD = "leave it out, or take the closed form of `shardwise plan`"

REFUSALS: tuple[tuple[Callable[[Plan, ModelFacts], Any], str], ...] = (
    (lambda plan, facts: not facts.takes_token_ids, "model.factory: the inputs of a module of your own are not known"),
    (
        lambda plan, facts: plan.stages and facts.stages.traced,
        "parallel.pipeline_parallel_degree above 1: torch traces this model's forward to cut it, in no other trace",
    ),
    (
        lambda plan, facts: plan.orthogonalized and plan.world.size > 1,
        "optimizer.name=Muon: its ranks ask each other what they hold, and the trace has one at a time",
    ),
    (
        lambda plan, facts: plan.job.model.task == "seq2seq_lm",
        "model.task=seq2seq_lm: encoder and decoder get sequences of two lengths, which the closed form does not know",
    ),
    (
        lambda plan, facts: TASKS[plan.job.model.task].reads_files,
        "model.task: how large images are and how long sound is, is known of rows alone",
    ),
)


def refuse_untraceable(plan: Plan, facts: ModelFacts) -> None:
    """Raise ConfigError for a job that the trace cannot follow; the message says which key."""
    for refuses, why in REFUSALS:
        if refuses(plan, facts):
            raise ConfigError(f"--trace cannot follow {why}; {INSTEAD}")


@contextmanager
def values_refused() -> Iterator[None]:
    """Name the place of code that needs values of tensors: none has any here.

    Raises:
        ConfigError: with the file and the line that are not torch's or ours.
    """
    try:
        yield
    except RuntimeError as error:
        if not asks_for_values(error):
            raise
        raise ConfigError(
            f"--trace cannot follow code that asks for the values of tensors{in_parentheses(raised_at(error))}; "
            f"{INSTEAD}"
        ) from error
