"""Errors of one rank that the others hear of, in worlds without a launcher of ours: torchrun, Slurm, own processes.

A rank that fails says so in the job's store, and to the native engine, before it leaves the group. Ranks that wait for
it see their collective fail: on the engine at once, on Gloo when the connection closes. They look in the store and
raise that rank's error under its number. Ranks that have failed alike are told nothing: a refusal on all ranks leaves
the group as it is.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from shardwise import errors
from shardwise._torch_compat.groups import default_store
from shardwise.collectives import engine
from shardwise.collectives.names import is_of_collective
from shardwise.errors import ShardwiseError, WorkerError

ERROR, COUNT = "shardwise/failure/{}", "shardwise/failures/{}"  # of a rank


@contextmanager
def failures_shared() -> Iterator[None]:
    """Tell the other ranks of an error of this one, and raise theirs where a collective has failed for it."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            raise
        with contextlib.suppress(dist.DistError):  # the rank that serves the store may be gone
            if not is_of_collective(error):
                _tell(error)
            elif (cause := _failure_elsewhere()) is not None:
                raise cause from error
        raise


def error_of_rank(rank: int, name: str, message: str) -> ShardwiseError:
    """Return the error that `rank` has raised, of the same class where it is one of ours."""
    error_class = getattr(errors, name, None)
    if not (isinstance(error_class, type) and issubclass(error_class, ShardwiseError)):
        return WorkerError(f"rank {rank} failed: {name}: {message}")
    return error_class(message if message.startswith("rank ") else f"rank {rank}: {message}")


def _tell(error: BaseException) -> None:
    store, rank, name, message = default_store(), dist.get_rank(), type(error).__name__, str(error)
    store.set(ERROR.format(rank), json.dumps([name, message]))
    store.add(COUNT.format(rank), 1)
    engine.tell_failure(f"{name}: {message}")


def _failure_elsewhere() -> ShardwiseError | None:
    """Return what another rank has told that has failed more often than this one."""
    store, own = default_store(), dist.get_rank()
    counts = [store.add(COUNT.format(rank), 0) for rank in range(dist.get_world_size())]
    rank = next((rank for rank, count in enumerate(counts) if count > counts[own]), None)
    return None if rank is None else error_of_rank(rank, *json.loads(store.get(ERROR.format(rank))))
