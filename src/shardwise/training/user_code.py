"""The user's own code that a job names, loaded and looked at before any worker starts and any file is written."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler

from shardwise.errors import UserCodeError
from shardwise.job.objects import check_arguments, load_object, raised_at
from shardwise.job.schema import Job
from shardwise.observe.callback import Callback, check_callback, load_callbacks
from shardwise.training.objectives.own_loss import ARGUMENTS


def check_user_code(job: Job, callbacks: Sequence[Callback] = ()) -> None:
    """Load the job's callbacks and its loss, and see that they can be called. Reads no corpus and no model.

    Args:
        callbacks: passed in Python beside the job's.

    Raises:
        ConfigError: a reference names nothing.
        UserCodeError: something is no callback, takes other arguments, or raised as it was imported.
    """
    load_callbacks(job.training.callbacks)
    for index, callback in enumerate(callbacks):
        check_callback(callback, f"callbacks[{index}]")
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
                f"training.callbacks{f' ({place})' if place else ''}"
            ) from error
