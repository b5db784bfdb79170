"""Learning-rate schedules after warm-up: functions of the step alone, so that a checkpoint holds nothing of them.

One of the user's own, `package.module:function`, is called as `function(step, steps)` for each step from 0 and returns
the learning rate as a factor of `optimizer.learning_rate`, as the functions of torch's `LambdaLR` do. Warm-up and the
last rate are then its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwise.errors import UserCodeError
from shardwise.job.objects import check_arguments, defined_at, in_parentheses, load_object, user_code

if TYPE_CHECKING:
    from shardwise.job.optimizer_section import OptimizerSection

ARGUMENTS = ("step", "steps")
STABLE = "warmup_stable_decay"
DECAY_SHARE = 10  # of the steps, one in so many is of the decay where its steps are not given


@dataclass(frozen=True)
class Moment:
    """A step of a schedule.

    Attributes:
        step, steps: of all, from 0.
        warmup: steps ahead of the schedule.
    """

    step: int
    steps: int
    warmup: int

    @property
    def progress(self) -> float:
        """From 0 at the peak to 1 at the last step, and behind it: a loop of one's own may go on."""
        return min(1.0, (self.step - self.warmup) / max(1, self.steps - 1 - self.warmup))


def decay_steps(settings: OptimizerSection, steps: int) -> int:
    """Return the steps in which the rate of `warmup_stable_decay` falls."""
    return settings.decay_steps or max(1, steps // DECAY_SHARE)


def falling(kind: str, progress: float) -> float:
    """Return what is left at `progress` of 0 to 1: on a line, half a cosine or one less the root."""
    if kind == "linear":
        return 1.0 - progress
    # SGDR, arXiv 1608.03983, equation 5; arXiv 2405.18392, equation 1.
    return 0.5 * (1.0 + math.cos(math.pi * progress)) if kind == "cosine" else 1.0 - math.sqrt(progress)


def _restarting(settings: OptimizerSection, at: Moment) -> float:
    """Half a cosine `cycles` times (SGDR with warm restarts); the last ends at 0."""
    cycle = at.progress * settings.cycles
    return falling("cosine", 1.0 if at.progress >= 1.0 else cycle % 1.0)


def _stable(settings: OptimizerSection, at: Moment) -> float:
    """The peak, and at the end a decay (arXiv 2404.06395, section 4.2)."""
    decay = decay_steps(settings, at.steps)
    return falling(settings.decay_type, min(1.0, max(0.0, (at.step + 1 - (at.steps - decay)) / decay)))


def _inverse_sqrt(settings: OptimizerSection, at: Moment) -> float:
    """The inverse square root of the step, 1 where warm-up ends (arXiv 1706.03762, equation 3)."""
    return math.sqrt(max(1, at.warmup) / (at.step + 1))


def _piecewise(settings: OptimizerSection, at: Moment) -> float:
    passed = [step for step in settings.milestones if step <= at.step]
    return settings.milestones[max(passed)] if passed else 1.0


SHAPES: dict[str, Callable[[OptimizerSection, Moment], float]] = {
    "constant": lambda settings, at: 1.0,
    "linear": lambda settings, at: falling("linear", at.progress),
    "cosine": lambda settings, at: falling("cosine", at.progress),
    "cosine_with_restarts": _restarting,
    STABLE: _stable,
    "inverse_sqrt": _inverse_sqrt,
    "piecewise": _piecewise,
}
FALLING = ("linear", "cosine", "cosine_with_restarts", STABLE)  # to final_learning_rate_ratio


def own_schedule_factor(reference: str, step: int, steps: int) -> float:
    """Return the factor of a step of `steps`.

    Raises:
        ConfigError: the reference names nothing.
        UserCodeError: the function takes other arguments, raises, or returns no number from 0 on.
    """
    what, function = f"optimizer.schedule={reference!r}", load_object(reference, "optimizer.schedule")
    check_arguments(function, ARGUMENTS, what)
    with user_code(f"{what} at step {step}"):
        factor: Any = function(step, steps)
    is_number = isinstance(factor, int | float) and not isinstance(factor, bool)
    if not is_number or not math.isfinite(factor) or factor < 0:
        raise UserCodeError(
            f"{what} returned {factor!r} at step {step} of {steps}; it must return a factor of the learning rate, "
            f"finite and not below 0{in_parentheses(defined_at(function))}"
        )
    return float(factor)
