"""Facts of models that some rank of this session has studied.

A study takes longer than a small test's steps, tests have few models, and a run studies on every rank. So ranks of the
session's pool take the facts of an equal job from a file. Jobs that read a model from disk are studied by each rank,
and so is all that `each_rank_studies`.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import inspect
import pickle
from collections.abc import Iterator
from pathlib import Path

from shardwise.commands import verify
from shardwise.errors import ShardwiseError
from shardwise.job.objects import load_object
from shardwise.job.schema import Job
from shardwise.model.facts import ModelFacts
from shardwise.training import session, setup

study = setup.study
_is_shared = True


def share(directory: Path) -> None:
    """Initialize a worker of the pool: what it studies lies in `directory` for all."""
    for module in (setup, session, verify):
        module.study = functools.partial(_shared_study, directory)  # type: ignore[attr-defined]


@contextlib.contextmanager
def each_rank_studies() -> Iterator[None]:
    """Let every rank study for itself inside, as in a run."""
    global _is_shared
    _is_shared = False
    try:
        yield
    finally:
        _is_shared = True


def _shared_study(directory: Path, job: Job, unstaged: ModelFacts | None = None) -> ModelFacts:
    if not _is_shared or _reads_files(job):
        return study(job, unstaged)
    with (directory / _key(job)).open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # the first rank studies, the others wait for it
        file.seek(0)
        outcome = pickle.loads(file.read() or pickle.dumps(None))  # what this session wrote
        if outcome is None:
            outcome = _outcome(job, unstaged)
            file.write(pickle.dumps(outcome))
    if isinstance(outcome, ShardwiseError):
        raise outcome
    return outcome


def _outcome(job: Job, unstaged: ModelFacts | None) -> ModelFacts | ShardwiseError:
    try:
        return study(job, unstaged)
    except ShardwiseError as error:
        return error


def _reads_files(job: Job) -> bool:
    is_elsewhere = job.model.config is not None and not isinstance(job.model.config, dict)
    return is_elsewhere or bool(job.model.path or job.model.weights or job.adapter.path)


def _key(job: Job) -> str:
    """Return a name for all that a study reads."""
    sections = job.model_dump_json(include={"model": True, "adapter": True, "data": True, "training": {"seed"}})
    source = ""
    if job.model.factory:
        factory = inspect.unwrap(load_object(job.model.factory, "model.factory"))
        source = Path(inspect.getfile(factory)).read_text(encoding="utf-8")
    is_staged = job.parallel.pipeline_parallel_degree > 1
    return hashlib.sha256(f"{sections} {source} {is_staged}".encode()).hexdigest()
