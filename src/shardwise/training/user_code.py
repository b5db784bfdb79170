"""The user's own code that a job names, loaded and looked at before any worker starts and any file is written."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler

from shardwise.errors import UserCodeError
from shardwise.job.objects import check_arguments, in_parentheses, is_reference, load_object, raised_at
from shardwise.job.optimizers import optimizer_class
from shardwise.job.schedules import own_schedule_factor
from shardwise.job.schema import Job
from shardwise.observe.callback import Callback, check_callbacks, load_callbacks
from shardwise.training.objectives.own_loss import ARGUMENTS


def check_user_code(job: Job, callbacks: Sequence[Callback] = ()) -> None:
    """Load the callbacks, loss, optimizer and schedule, and see that they can be called. Reads no corpus and no model.

    Args:
        callbacks: passed in Python beside the job's.

    Raises:
        ConfigError: a reference names nothing.
        UserCodeError: something is not what it is named as, takes other arguments, or raises.
    """
    load_callbacks(job.training.callbacks)
    check_callbacks(callbacks)
    if is_reference(job.optimizer.name):
        optimizer_class(job.optimizer.name)
    if is_reference(job.optimizer.schedule):
        for step in (0, job.training.steps - 1):
            own_schedule_factor(job.optimizer.schedule, step, job.training.steps)
    if job.model.loss is not None:
        loss = load_object(job.model.loss, "model.loss")
        check_arguments(loss, ARGUMENTS, f"model.loss={job.model.loss!r}")


def check_can_be_sent(callbacks: Sequence[Callback]) -> None:
    """Refuse callbacks that cannot be sent to worker processes.

    Raises:
        UserCodeError: with the reason.
    """
    for index, callback in enumerate(callbacks):
        try:
            ForkingPickler.dumps(callback)
        except Exception as error:  # pickle raises whatever an object's own code does
            place = raised_at(error)
            raise UserCodeError(
                f"callbacks[{index}]: a {type(callback).__qualname__} cannot be sent to the workers ({error}); define "
                "its class at the top of a module and open what it holds in on_start, or name it in "
                f"training.callbacks{in_parentheses(place)}"
            ) from error
