"""Calls of a session that all ranks make together: the others hear of an error, and it is named when a rank goes on.

A script may catch what a call has raised. A refused argument can be mended, if all ranks have refused theirs. Once a
step or an evaluation has begun, an error leaves gradients, statistics and messages as they were at the time: no call
may come after it, with one process neither.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Concatenate, ParamSpec, TypeVar

from shardwise.errors import WorkerError
from shardwise.launch.peer_failure import failures_shared, mark_shared, settle_failure

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class CollectiveCalls:
    """The calls of one session, and the error that has ended them.

    Attributes:
        failure: the error that has ended them, if one has.
    """

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self._is_half_done = False

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Make a call inside, where none before has failed."""
        settle_failure()
        if self.failure is not None:
            again = WorkerError(
                f"a call of this session has failed before: {type(self.failure).__name__}: {self.failure}. It leaves "
                "half a step behind; open another session, from a checkpoint where there is one (checkpoint.resume)"
            )
            raise mark_shared(again) from self.failure
        try:
            with failures_shared():
                yield
        except BaseException as error:
            if self._is_half_done:
                self.failure = error
            raise

    @contextmanager
    def final_if_it_fails(self) -> Iterator[None]:
        """Let an error inside, in a call, end the calls."""
        self._is_half_done = True
        yield
        self._is_half_done = False

    def leave_others(self) -> None:
        """Let ranks that wait for this one hear that it has failed, where they do not know."""
        with suppress(WorkerError):
            settle_failure()


def collective(
    method: Callable[Concatenate[Any, Parameters], Result],
) -> Callable[Concatenate[Any, Parameters], Result]:
    """Return a method of an object with `calls` that all ranks call together."""

    @functools.wraps(method)
    def call(self: Any, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        with self.calls.shared():
            return method(self, *args, **kwargs)

    return call
