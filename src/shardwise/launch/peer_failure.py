"""Errors of one rank that the others hear of, in worlds without a launcher of ours: torchrun, Slurm, own processes.

A rank that fails says so in the job's store, and to the native engine, before it leaves the group. Ranks that wait for
it see their collective fail: on the engine at once, on Gloo when the connection closes. They look in the store and
raise that rank's error under its number. Ranks that have failed alike are told nothing: a refusal on all ranks leaves
the group as it is.

A script may catch an error and go on. Before it meets the others again, `settle_failure` finds out whether all have
failed alike. Where they have not, this rank's next collective would meet another one of theirs.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from shardwise import errors
from shardwise._torch_compat.groups import close_gloo, default_store
from shardwise.collectives import engine
from shardwise.collectives.names import is_of_collective
from shardwise.errors import ShardwiseError, WorkerError

Error = TypeVar("Error", bound=BaseException)
ERROR, COUNT, HEARD = "shardwise/failure/{}", "shardwise/failures/{}", "shardwise/failure-heard/{}"  # of a rank
ALL, ALONE = "shardwise/failures", "shardwise/failed-alone"  # failures of all ranks; the rank that the others left
WAIT_SECONDS = 10.0  # for the others to fail alike
LOOK_SECONDS = 0.02
CLOSE = timedelta(milliseconds=1)

_unsettled: dist.Store | None = None  # of the group in which this process has told an error since the ranks met


@contextmanager
def failures_shared() -> Iterator[None]:
    """Tell the other ranks of an error of this one, and raise theirs where a collective has failed for it."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if not dist.is_initialized() or dist.get_world_size() == 1 or getattr(error, "is_shared", False):
            raise
        with contextlib.suppress(dist.DistError):  # the rank that serves the store may be gone
            if not is_of_collective(error):
                _tell(error)
            elif (cause := _failure_elsewhere()) is not None:
                raise cause from error
        raise


def settle_failure() -> None:
    """Return where this rank has told no error, or all have failed alike since they met. Before a collective.

    Raises:
        WorkerError: this rank has failed and others have gone on; those that wait for it hear of it.
    """
    global _unsettled
    if _unsettled is None:
        return
    if not dist.is_initialized() or default_store() is not _unsettled:
        _unsettled = None
        return
    try:
        if _have_failed_alike(_unsettled):
            _unsettled = None
            return
        close_gloo(CLOSE)
        raise _left_behind(_unsettled)
    except dist.DistError as error:  # of the store
        raise WorkerError(f"this rank has failed, and the others have left: {error}") from error


def _left_behind(store: dist.Store) -> WorkerError:
    """Return the error of a rank that has failed while others went on: the first such rank's is named."""
    if not store.check([ALONE]):
        store.set(ALONE, str(dist.get_rank()))
    rank = int(store.get(ALONE))
    name, message = json.loads(store.get(ERROR.format(rank)))
    error = WorkerError(
        f"rank {rank} had failed, and others had gone on: {name}: {message}. They cannot meet again; start all ranks "
        "anew, from a checkpoint where there is one (checkpoint.resume)"
    )
    return mark_shared(error)


def mark_shared(error: Error) -> Error:
    """Return an error of which no other rank has to be told."""
    error.is_shared = True  # type: ignore[attr-defined]
    return error


def error_of_rank(rank: int, name: str, message: str) -> ShardwiseError:
    """Return the error that `rank` has raised, of the same class where it is one of ours."""
    error_class = getattr(errors, name, None)
    if not (isinstance(error_class, type) and issubclass(error_class, ShardwiseError)):
        return WorkerError(f"rank {rank} failed: {name}: {message}")
    return error_class(message if message.startswith("rank ") else f"rank {rank}: {message}")


def _tell(error: BaseException) -> None:
    global _unsettled
    store, rank, name, message = default_store(), dist.get_rank(), type(error).__name__, str(error)
    store.set(ERROR.format(rank), json.dumps([name, message]))
    store.add(COUNT.format(rank), 1)
    store.add(ALL, 1)
    engine.tell_failure(f"{name}: {message}")
    mark_shared(error)
    _unsettled = store


def _failure_elsewhere() -> ShardwiseError | None:
    """Return what another rank has told that has failed more often than this one."""
    store, own = default_store(), dist.get_rank()
    counts = [store.add(COUNT.format(rank), 0) for rank in range(dist.get_world_size())]
    rank = next((rank for rank, count in enumerate(counts) if count > counts[own]), None)
    if rank is None:
        return None
    store.add(HEARD.format(rank), 1)
    return mark_shared(error_of_rank(rank, *json.loads(store.get(ERROR.format(rank)))))


def _have_failed_alike(store: dist.Store) -> bool:
    """Return whether all ranks have failed as often as this one, which the others get some time for."""
    rank, end = dist.get_rank(), time.monotonic() + WAIT_SECONDS
    of_all = dist.get_world_size() * store.add(COUNT.format(rank), 0)
    while not store.check([ALONE]):
        if store.add(ALL, 0) >= of_all:
            return True
        if store.add(HEARD.format(rank), 0) or time.monotonic() > end:
            return False
        time.sleep(LOOK_SECONDS)
    return False
