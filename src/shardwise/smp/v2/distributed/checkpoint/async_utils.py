"""Saves that run while training goes on."""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from shardwise.errors import CheckpointError

_untold: list[_Call] = []  # saves of which nobody has asked whether they are finished


class _Call:
    """A save on a thread."""

    def __init__(self, number: int, work: Callable[[], Any], group: Any) -> None:
        self.number, self.error, self.group = number, None, group
        _untold.append(self)
        self.thread = threading.Thread(target=self._run, args=(work,), name=f"checkpoint-{number}")
        self.thread.start()

    def _run(self, work: Callable[[], Any]) -> None:
        try:
            work()
        except BaseException as error:  # shown by whoever asks for the call
            self.error = error

    error: BaseException | None


class AsyncCallsQueue:
    """Saves in the order in which they were begun. One is finished when it is so on all ranks of its group.

    Work that is begun runs at once, beside what runs already; `async_save` lets saves of one group take turns.
    """

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._count = 0

    def schedule(self, work: Callable[[], Any], group: Any = None) -> int:
        """Begin `work` on a thread; its number. `group`: the ranks that do so, all where it is None."""
        self._count += 1
        self._calls.append(_Call(self._count, work, group))
        return self._count

    def get_num_unfinalized_calls(self) -> int:
        """Saves that nobody has been told are finished."""
        return len(self._calls)

    def maybe_finalize_async_calls(
        self, blocking: bool = True, process_group: Any = None, skip_sync: bool = False
    ) -> list[int]:
        """Numbers of the saves that have finished since, waiting for all if `blocking`. Collective over the group;
        without one over that of each save, since other ranks have none to tell of.

        Raises:
            CheckpointError: a save has failed on this rank.
        """
        done: list[int] = []
        while self._calls:
            call = self._calls[0]
            if blocking:
                call.thread.join()
            running = call.thread.is_alive()
            if not skip_sync and dist.is_initialized():
                group = call.group if process_group is None else process_group
                states: list[Any] = [None] * dist.get_world_size(group)
                dist.all_gather_object(states, running, group=group)
                running = any(states)
            if running:
                break
            _untold.remove(self._calls.pop(0))
            if call.error is not None:
                raise CheckpointError(f"the asynchronous save {call.number} failed: {call.error}") from call.error
            done.append(call.number)
        return done

    def close(self) -> None:
        """Wait for all."""
        for call in self._calls:
            call.thread.join()


@atexit.register
def _tell() -> None:
    """Name the failures that the script has not asked for: they may be of groups that it has ended too early."""
    for call in _untold:
        if call.error is not None:
            print(
                f"error: the asynchronous save {call.number} failed and its checkpoint is incomplete: {call.error}; "
                "call maybe_finalize_async_calls(blocking=True) before the process groups are destroyed",
                file=sys.stderr,
            )
