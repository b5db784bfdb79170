"""Learning-rate schedules of the user's own: `optimizer.schedule: package.module:function`.

The function is called as `function(step, steps)` for each step from 0 and returns the learning rate as a factor of
`optimizer.learning_rate`, as the functions of torch's `LambdaLR` do. Warm-up and the last rate are then its own.
"""

from __future__ import annotations

import math
from typing import Any

from shardwise.errors import UserCodeError
from shardwise.job.objects import check_arguments, defined_at, in_parentheses, load_object, user_code

ARGUMENTS = ("step", "steps")


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
