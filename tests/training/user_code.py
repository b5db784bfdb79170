"""Code of a user's own that works, and code that does not, for jobs to name."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from shardwise.observe.callback import Callback


class Calls(Callback):
    """Keeps the names of its hooks in the order in which they are called."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_"):
            self.names.append(name)
        return super().__getattribute__(name)


class FailsInTheMiddle(Callback):
    """Raises after step 3 on rank 1."""

    def on_step_end(self, session: Any, record: Any) -> None:
        if dist.get_rank() == 1 and record["step"] == 3:
            raise ValueError("the sky fell")


class FailsAtTheStart(Callback):
    """Raises before the first step on rank 0."""

    rank_zero_only = True

    def on_start(self, session: Any) -> None:
        raise KeyError("no such place")


class MisspeltHook(Callback):
    """Has a hook that nobody would call."""

    def on_step_ended(self, session: Any, record: Any) -> None:
        """Do nothing."""


class TakesTooLittle(Callback):
    """Has a hook that cannot be called."""

    def on_step_end(self, session: Any) -> None:  # type: ignore[override]
        """Do nothing."""


class NoCallback:
    """Has the hooks and is no callback."""

    def on_start(self, session: Any) -> None:
        """Do nothing."""


def loss_of_one_argument(output: Any) -> Any:
    return output


def loss_that_raises(output: Any, batch: Any) -> Any:
    return output.no_such_attribute


def loss_that_is_a_mean(output: Any, batch: Any) -> torch.Tensor:
    mean: torch.Tensor = output.mean()
    return mean


ANSWER = 42
