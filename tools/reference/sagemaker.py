"""Rows of the page on SageMaker's SDK: what becomes of each argument."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.sagemaker.estimator import IDLE, REFUSED, EstimatorSettings
from shardwise.sagemaker.model_trainer import ModelTrainer

ARGUMENT_HEAD = ("argument", "default", "here")
TRAINER_STATE = "latest_training_job"  # no argument
TRAINER_REFUSED = {
    "algorithm_name": "refused: AWS's own algorithms are not started",
    "model_package_config": "refused: a model is registered with SageMaker's own SDK",
}


def estimator_rows() -> Iterator[tuple[str, str, str]]:
    """Yield the arguments of the estimator: those that act, those that do nothing, those that are refused."""
    for name, field in EstimatorSettings.model_fields.items():
        yield f"`{name}`", _default(field.get_default(call_default_factory=True)), "acts"
    for name, why in IDLE.items():
        yield f"`{name}`", "`None`", f"no effect: {why}"
    for name, (harmless, why) in REFUSED.items():
        values = " and ".join(f"`{value!r}`" for value in harmless)
        yield f"`{name}`", "`None`", f"refused but for {values}: {why}"


def trainer_rows() -> Iterator[tuple[str, str, str]]:
    """Yield the arguments of the trainer."""
    for name, field in ModelTrainer.model_fields.items():
        if name != TRAINER_STATE:
            default = field.get_default(call_default_factory=True)
            yield f"`{name}`", _default(default), TRAINER_REFUSED.get(name, "acts")


def _default(value: object) -> str:
    return f"`{getattr(value, 'value', value)!r}`"
