"""The objective of a job: the first row of one table that serves it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from shardwise.job.objects import load_object
from shardwise.job.schema import Job
from shardwise.model.facts import ModelFacts
from shardwise.parallel.model import ParallelModel
from shardwise.parallel.objective import Objective
from shardwise.training.objectives.classification import Classification
from shardwise.training.objectives.language_modelling import LanguageModelling
from shardwise.training.objectives.own_loss import LossFunction
from shardwise.training.objectives.own_module import OwnModule
from shardwise.training.objectives.preference import DirectPreference


class ObjectiveChoice(NamedTuple):
    """When an objective serves a job and its model, and how it is made."""

    serves: Callable[[Job, ModelFacts], bool]
    make: Callable[[ParallelModel], Objective]


def _with_loss_of_job(model: ParallelModel) -> Objective:
    return _own_module(model, load_object(str(model.plan.job.model.loss), "model.loss"))


def _own_module(model: ParallelModel, loss: LossFunction | None = None) -> Objective:
    cast_arguments = model.facts.cast_arguments if model.plan.keeps_float_arguments else None
    return OwnModule(loss, model.compute_dtype, cast_arguments)


OBJECTIVES = (
    ObjectiveChoice(lambda job, facts: job.model.loss is not None, _with_loss_of_job),
    ObjectiveChoice(lambda job, facts: job.objective == "dpo", DirectPreference),
    ObjectiveChoice(lambda job, facts: facts.classifies, Classification),
    ObjectiveChoice(lambda job, facts: facts.returns_logits, LanguageModelling),
    ObjectiveChoice(lambda job, facts: True, _own_module),
)


def make_objective(model: ParallelModel) -> Objective:
    """Return the objective of a job's own model."""
    choice = next(choice for choice in OBJECTIVES if choice.serves(model.plan.job, model.facts))
    return choice.make(model)
