"""Functions that rank 0 calls on all ranks: for a program that runs on rank 0 alone and needs the sharded model.

Rank 0 makes its calls through `RankCalls`, the other ranks are in `answer_calls` meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from shardwise.collectives.names import CollectiveName
from shardwise.parallel.model import ParallelModel

T = TypeVar("T")
CALL = CollectiveName("a call of rank 0", "world", "broadcast")


class RankCalls:
    """Calls of one rank's program on all ranks; made by `calls_on_all_ranks`."""

    def __init__(self, model: ParallelModel) -> None:
        self.model = model

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Return rank 0's `function(model, *args)`, which every rank calls; it can be pickled, as its arguments."""
        _broadcast((function, args))
        return function(self.model, *args)


@contextmanager
def calls_on_all_ranks(model: ParallelModel) -> Iterator[RankCalls]:
    """Yield what rank 0 makes its calls with; afterwards the other ranks go on."""
    try:
        yield RankCalls(model)
    finally:
        _broadcast(None)


def answer_calls(model: ParallelModel) -> None:
    """Make the calls of rank 0 too, until it has made its last one."""
    while (call := _broadcast(None)) is not None:
        function, args = call
        function(model, *args)


def _broadcast(call: Any) -> Any:
    content = [call]
    with CALL:
        dist.broadcast_object_list(content, src=0)
    return content[0]
