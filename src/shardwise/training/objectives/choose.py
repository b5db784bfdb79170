"""The objective of a job."""

from __future__ import annotations

from shardwise.job.objects import load_object
from shardwise.parallel.model import ParallelModel
from shardwise.parallel.objective import Objective
from shardwise.training.objectives.language_modelling import LanguageModelling
from shardwise.training.objectives.own_module import OwnModule


def make_objective(model: ParallelModel) -> Objective:
    """Return the objective of a job's own model: its loss function, language modelling, or the module's own loss."""
    settings = model.plan.job.model
    if settings.loss is not None:
        return OwnModule(load_object(settings.loss), model.compute_dtype)
    return LanguageModelling(model) if model.facts.returns_logits else OwnModule(None, model.compute_dtype)
