"""Callbacks: code that is called as a training goes on. The display, the recorder and the trackers are callbacks too.

The order, which is the same in a job's training and in a loop of one's own:

| hook | called |
|---|---|
| `on_start(session)` | once, after a checkpoint has been restored and before the first step |
| `on_step_begin(session)` | before each step's forward |
| `on_step_end(session, record)` | after each step's update, with its record of metrics.jsonl |
| `on_evaluation(session, record)` | after each evaluation, with its record |
| `on_save(session, record)` | when a checkpoint has begun to be written |
| `on_end(session, result)` | once, after the last step, with what the run has come to |
| `on_failure(session, error)` | once, in place of `on_end`, where an error ends the run |

`on_note(session, text, record)` comes between them, whenever there is something to say. Callbacks are called one after
the other: those of the job first, in its order, then those passed in Python, then the package's own. So what a callback
adds to a record in `on_step_end` is shown, recorded and tracked like every other figure.

A callback runs on every rank, where it may use collectives if all ranks do so alike, but in `on_failure`, when other
ranks may be gone. With `rank_zero_only = True` it runs on rank 0 alone. An error on one rank ends the run on all: the
ranks agree on it at the next step, so that none of them waits for another, and a checkpoint that is being written is
finished first. The failed callback is not called again.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from shardwise.collectives.rank_record import current_phase, mark_phase
from shardwise.errors import OutputError, UserCodeError, require_type
from shardwise.job.objects import check_arguments, defined_at, in_parentheses, load_object, user_code
from shardwise.job.schema import Job
from shardwise.observe.metrics import Record
from shardwise.words import nearest

if TYPE_CHECKING:  # the report reads the display's words and needs no torch
    from shardwise.model.facts import ModelFacts
    from shardwise.parallel.layout import Layout
    from shardwise.parallel.model import ParallelModel
    from shardwise.plan.plan import Plan


class ObservedSession(Protocol):
    """A session as a callback may use it.

    Attributes:
        rank: of this process in the world.
        steps_done: optimizer steps so far, those before a resume included.
        model: this rank's part; `model.module` is the user's model as far as it is here.
        optimizer: over this rank's elements; `optimizer.inner` is the torch optimizer.
        notes: what a user should know before the first step.
    """

    @property
    def rank(self) -> int: ...
    @property
    def steps_done(self) -> int: ...
    @property
    def job(self) -> Job: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def facts(self) -> ModelFacts: ...
    @property
    def model(self) -> ParallelModel: ...
    @property
    def optimizer(self) -> Any: ...
    @property
    def notes(self) -> Sequence[str]: ...

    def averaged(self) -> AbstractContextManager[None]:
        """Let the model have the weights that are evaluated and exported inside: averages, where some are kept."""
        ...

    def ema_in_place(self) -> AbstractContextManager[None]:
        """Let the model have the moving averages of its weights inside, where `training.ema_decay` keeps some."""
        ...

    def note(self, text: str, record: Record | None = None) -> None:
        """Say a sentence to the user, and keep `record`, which is no step's, if there is one."""
        ...

    def request_stop(self, reason: str) -> None:
        """Ask all ranks to end the run after the next step, with a checkpoint."""
        ...


class Callback:
    """Base class of callbacks; every method does nothing. Override those that you need.

    `rank_zero_only` is for what writes files or talks to a server: the callback then runs on rank 0 alone.
    """

    rank_zero_only = False

    def on_start(self, session: ObservedSession) -> None:
        """Prepare; the model is built and its state restored."""

    def on_step_begin(self, session: ObservedSession) -> None:
        """Take note that a step begins."""

    def on_step_end(self, session: ObservedSession, record: Record) -> None:
        """Take the record of a step; keys that are added to it are recorded too."""

    def on_evaluation(self, session: ObservedSession, record: Record) -> None:
        """Take the record of an evaluation: `step`, `validation_loss` and the job's other metrics.

        Numbers that are added to it are recorded too, and `evaluation.metric` may name one.
        """

    def on_save(self, session: ObservedSession, record: Record) -> None:
        """Take note of a checkpoint: `step` and `checkpoint`, where it will be complete soon."""

    def on_note(self, session: ObservedSession, text: str, record: Record | None) -> None:
        """Take a sentence for the user, and the record that it is about, if any."""

    def on_end(self, session: ObservedSession, result: Record) -> None:
        """Finish; `result` holds what run.json says of a finished run."""

    def on_failure(self, session: ObservedSession, error: BaseException) -> None:
        """Clean up; collectives may not be used here."""


@contextmanager
def reported(session: ObservedSession, consequence: str) -> Iterator[None]:
    """Say what fails at the end of a run in place of raising it: the trained model is written by then.

    Raises:
        OutputError: of the disk, which has more to say.
    """
    try:
        yield
    except OutputError:
        raise
    except Exception as error:
        session.note(f"{consequence}: {type(error).__name__}: {error}")


HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_"))


def load_callbacks(references: Sequence[str]) -> list[Callback]:
    """Return the callbacks that a job names: classes and functions are called without arguments, objects taken as is.

    Raises:
        ConfigError: a reference names nothing.
        UserCodeError: what it names is no callback, or has a hook that cannot be called.
    """
    callbacks = []
    for index, reference in enumerate(references):
        what = f"training.callbacks[{index}]={reference!r}"
        loaded = load_object(reference, f"training.callbacks[{index}]")
        if not isinstance(loaded, Callback) and callable(loaded):
            check_arguments(loaded, (), what)
            with user_code(what):
                loaded = loaded()
        callbacks.append(check_callback(loaded, what))
    return callbacks


def check_callbacks(callbacks: Any) -> list[Callback]:
    """Return the callbacks that were passed in Python, each as `check_callback` returns it.

    Raises:
        ConfigError: they are no list.
    """
    require_type(callbacks, Sequence, "callbacks", "give a list of objects whose classes inherit shardwise.Callback")
    return [check_callback(callback, f"callbacks[{index}]") for index, callback in enumerate(callbacks)]


def check_callback(callback: Any, what: str) -> Callback:
    """Return `callback` where it is one whose hooks can be called.

    Raises:
        UserCodeError: with the hook, the arguments that it has to take, and file and line.
    """
    if not isinstance(callback, Callback):
        place = defined_at(type(callback))
        raise UserCodeError(
            f"{what} is a {type(callback).__name__}; a callback is a subclass of shardwise.Callback"
            f"{in_parentheses(place)}"
        )
    for name in dir(type(callback)):
        if name.startswith("on_") and name not in HOOKS:
            raise UserCodeError(
                f"{what}: {name} is no hook and would never be called.{nearest(name, HOOKS)} "
                f"({defined_at(getattr(type(callback), name))})"
            )
    for name in HOOKS:
        arguments = list(inspect.signature(getattr(Callback, name)).parameters)[1:]
        check_arguments(getattr(callback, name), arguments, f"{what}: {name}")
    return callback


class CallbackList:
    """The callbacks of one session on one rank, called in order; the first error is kept until the ranks agree on it.

    Attributes:
        failure: the first error of a callback on this rank.
    """

    def __init__(self, callbacks: Iterable[Callback], rank: int) -> None:
        self.failure: Exception | None = None
        self._rank = rank
        self._callbacks: list[Callback] = []
        self._failed: set[int] = set()
        self.extend(callbacks)

    def extend(self, callbacks: Iterable[Callback]) -> None:
        """Add further ones at the end, without those that are for rank 0 alone on another."""
        self._callbacks += [callback for callback in callbacks if self._rank == 0 or not callback.rank_zero_only]

    def call(self, hook: str, *arguments: Any) -> None:
        """Call `hook` of every callback that has not failed; an error is kept as `failure`."""
        phase = current_phase()
        for callback in self._callbacks:
            if id(callback) in self._failed:
                continue
            what = f"{type(callback).__module__}:{type(callback).__qualname__}.{hook}"
            mark_phase(f"callback {what}")
            try:
                with user_code(what):
                    getattr(callback, hook)(*arguments)
            except Exception as error:
                self._failed.add(id(callback))
                self.failure = self.failure or error
        mark_phase(phase)

    def clean_up(self, session: ObservedSession, error: BaseException) -> None:
        """Call `on_failure` of every callback, failed ones too; what it raises is left out beside `error`."""
        self._failed.clear()
        self.call("on_failure", session, error)
