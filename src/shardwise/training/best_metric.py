"""The best evaluation of a run so far, by the job's metric, and the early end of a run that finds no better one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from shardwise.checkpoint.manifest import Progress
from shardwise.errors import ConfigError
from shardwise.job.devices import widest_float
from shardwise.job.schema import EvaluationSection, Job
from shardwise.words import nearest


def is_judged(job: Job) -> bool:
    """Return whether something of a run follows from `evaluation.metric`, beside what the validation loss tells."""
    has_other = job.checkpoint.keep_best and job.evaluation.metric != "validation_loss"
    return has_other or job.evaluation.early_stopping_patience > 0


def metric_of(record: Mapping[str, Any], settings: EvaluationSection, device: torch.device) -> float:
    """Return the metric in rank 0's record of an evaluation, on every rank. Collective.

    Raises:
        ConfigError: the record has no such number.
    """
    value: Any = record.get(settings.metric, "")
    value = value.item() if getattr(value, "ndim", None) == 0 else value  # a tensor's, or one of numpy's
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    numbers = [float(value) if is_number else 0.0, float(is_number)]
    told = torch.tensor(numbers, dtype=widest_float(device), device=device)
    dist.broadcast(told, 0)
    number, is_there = told.tolist()
    if not is_there:
        known = [key for key, other in record.items() if isinstance(other, int | float) and key != "step"]
        raise ConfigError(
            f"evaluation.metric={settings.metric!r} is no number of the record of an evaluation."
            f"{nearest(settings.metric, known)}"
        )
    return float(number)


def judged(progress: Progress, metric: float, settings: EvaluationSection) -> Progress:
    """Return the progress with the metric of its step compared with the best before; NaN is never better."""
    if progress.judged_by != settings.metric:  # what it was judged by before is no measure of this one
        progress = progress.model_copy(update={"best_metric": None, "best_step": 0, "evaluations_since_best": 0})
    sign = 1 if settings.prefers_greater else -1
    best = progress.best_metric
    is_better = math.isfinite(metric) and (best is None or sign * (metric - best) > settings.early_stopping_threshold)
    changes: dict[str, Any] = {"judged_by": settings.metric, "metric": metric if math.isfinite(metric) else None}
    if is_better:
        changes |= {"best_metric": metric, "best_step": progress.step, "evaluations_since_best": 0}
    else:
        changes["evaluations_since_best"] = progress.evaluations_since_best + 1
    return progress.model_copy(update=changes)


def early_stop(progress: Progress, settings: EvaluationSection) -> str | None:
    """Return why the run ends after this evaluation; None where it goes on."""
    patience, waited = settings.early_stopping_patience, progress.evaluations_since_best
    if not patience or waited < patience or progress.judged_by != settings.metric:
        return None
    best = "" if progress.best_metric is None else f" than {progress.best_metric:.4f} at step {progress.best_step}"
    return f"no better {settings.metric}{best} in {waited} evaluation{'s' * (waited > 1)}"
