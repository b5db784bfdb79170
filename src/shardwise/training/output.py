"""The output directory: whose it is, what is in it, and that two runs never share it.

`run.json` names the job that owns a directory. The same job may run again and replaces its own files, but never
checkpoints: it goes on from them, or takes another directory. Another job's directory, a directory of other files and
one that cannot be written are refused before anything starts.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from shardwise.checkpoint.catalog import RUN_FILE, checkpoints, complete, find_store, named_checkpoint
from shardwise.checkpoint.manifest import FILE
from shardwise.checkpoint.stores import checkpoint_store, split
from shardwise.errors import CheckpointError, IncompleteError, OutputError
from shardwise.job.schema import Job
from shardwise.launch.watch.live import PREFIX as LAUNCHER_PREFIX
from shardwise.launch.watch.watcher import STACKS_FILE
from shardwise.observe.output_disk import writing
from shardwise.words import listed

METRICS_FILE = "metrics.jsonl"
MODEL_DIRECTORY = "model"
ADAPTER_DIRECTORY = "adapter"
EMA_MODEL_DIRECTORY = "model_ema"
EMA_ADAPTER_DIRECTORY = "adapter_ema"
SAMPLE_FILE = "sample.txt"
REPORT_FILE = "report.html"
LOCK_FILE = ".lock"
_MODELS = (MODEL_DIRECTORY, ADAPTER_DIRECTORY, EMA_MODEL_DIRECTORY, EMA_ADAPTER_DIRECTORY)
_RESULTS = (SAMPLE_FILE, REPORT_FILE, "job.yaml", *_MODELS)
_RECORDS = (METRICS_FILE, STACKS_FILE, "tensorboard", "profile")  # a run that is resumed goes on with them

# Which keys of a job may differ in two runs of the same training.
UNLIKE: Any = {
    "output": True,
    "observe": True,
    "launch": True,
    "checkpoint": True,
    "evaluation": True,
    "parallel": {"timeout_seconds", "max_restarts"},
    "training": {"callbacks"},
}


# Keys of model and data that may differ in a run that goes on: no number depends on the first, and the tokens that the
# second lead to are compared by their hash when the checkpoint is read.
SAME_NUMBERS: dict[str, set[str]] = {
    "adapter": set(),
    "model": {"attention", "compile", "cuda_graphs", "liger", "trust_remote_code"},
    "data": {
        "path", "format", "field", "tokenizer", "vocabulary_size", "max_documents", "cache_directory",
        "num_workers", "cache_limit",
        # The checkpoint's own words on these come when it is read, with the way out.
        "validation_split", "sources", "curriculum", "on_bad_files",
    },
}  # fmt: skip


def job_fingerprint(job: Job) -> str:
    """Equal for jobs that train the same model in the same way; what is shown and kept, and where, does not count."""
    data = job.model_dump(mode="json", exclude=UNLIKE)
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def check_output(job: Job) -> None:
    """Refuse directories that cannot be written or are somebody else's; changes nothing.

    Raises:
        OutputError: with the reason and another directory to use; another run may be writing there now.
        DamagedError: the run is to go on from checkpoints there, and no whole one is left.
    """
    path = Path(job.output)
    existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise OutputError(
            f"output={job.output!r} cannot be written: {existing} is not a writable directory; use --output "
            "NEW_DIRECTORY"
        )
    if not path.exists():
        return _check_checkpoints(job)
    if (path / LOCK_FILE).exists():
        _locked(job).release()
    owner = _owner(path)
    if owner is None and _kept_files(path):
        raise OutputError(
            f"output={job.output!r} holds files that are not a run of shardwise; use --output NEW_DIRECTORY"
        )
    _check_checkpoints(job)
    if owner not in (None, job_fingerprint(job)) and not _unused(path):
        _check_goes_on(job)


def _check_checkpoints(job: Job) -> None:
    """A run that does not go on from the checkpoints that are there may not write among them."""
    store = checkpoint_store(job)
    if job.checkpoint.resume == "auto":
        next(complete(store), None)  # raises where damage, as far as sizes show it, has left none
        return
    names = checkpoints(store)
    if names:
        raise OutputError(
            f"{store.root} holds checkpoints of an earlier run, the newest {names[0]}; nothing was "
            "overwritten; use --checkpoint.resume auto to go on from it, or --output NEW_DIRECTORY"
        )


def check_resume(job: Job) -> None:
    """Refuse a named checkpoint to resume from that is none, before workers are started for it.

    Raises:
        CheckpointError: with what to name instead, where there is such a thing.
    """
    path = job.checkpoint.resume
    if path in ("none", "auto"):
        return
    try:
        named_checkpoint(path)
    except IncompleteError as error:
        if newest := _newest_in(path):
            reason = f"holds checkpoints and is none itself; use {newest}, the newest complete one"
        elif "://" not in path and not Path(path).exists():
            reason = "does not exist; give the path of a checkpoint, or auto"
        elif beside := _newest_in(split(path)[0]):
            reason = f"has no {FILE}, which is written last, so it is not complete; use {beside}, the newest that is"
        else:
            raise
        raise CheckpointError(f"checkpoint.resume={path!r} {reason}") from error


def _newest_in(path: str) -> str | None:
    """The newest complete checkpoint of a directory of them, or of a run."""
    with suppress(CheckpointError):
        store = find_store(path)
        return next((f"{store.root}/{name}" for name, _ in complete(store)), None)
    return None


def _check_goes_on(job: Job) -> None:
    """Refuse the directory of another job, unless the run goes on from its checkpoints of this model and data.

    Layout, precision and schedule may have changed.

    Raises:
        OutputError: with the keys that differ, and how to go on with them.
    """
    where = f"output={job.output!r} holds the run of another job"
    store = checkpoint_store(job)
    newest = next(complete(store), None) if job.checkpoint.resume == "auto" else None
    if newest is None:
        run_file = Path(job.output) / RUN_FILE
        raise OutputError(f"{where} ({run_file}); nothing was overwritten; use --output NEW_DIRECTORY")
    name, manifest = newest
    changes = list(_changes(job, manifest.job))
    if changes:
        raise OutputError(
            f"{where}: {listed(changes)}; nothing was overwritten; restore what it was, or start anew with --output "
            f"NEW_DIRECTORY; with --checkpoint.resume {store.root}/{name} beside that it goes on from its newest "
            "checkpoint, where weights and samples are the same"
        )


def _changes(job: Job, written: dict[str, Any]) -> Iterator[str]:
    """Yield the keys of model and data that differ from a checkpoint's job and that numbers depend on."""
    for section, unlike in SAME_NUMBERS.items():
        for key, value in job.model_dump(mode="json")[section].items():
            before = written.get(section, {}).get(key, value)
            if key not in unlike and before != value:
                yield f"{section}.{key} was {before!r}, is {value!r}"


def claim_output(job: Job) -> FileLock:
    """Make the directory this run's until the lock is released or the process ends.

    Raises:
        OutputError, DamagedError: as `check_output`.
    """
    check_output(job)
    path = Path(job.output)
    lock = _locked(job)
    if _owner(path) is None or _unused(path):
        write_run(path, {"job_fingerprint": job_fingerprint(job), "job": job.model_dump(mode="json")})
    return lock


def _locked(job: Job) -> FileLock:
    path = Path(job.output)
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path / LOCK_FILE)
        lock.acquire(blocking=False)
    except Timeout:
        raise OutputError(
            f"output={job.output!r}: another run is writing there now; use --output NEW_DIRECTORY"
        ) from None
    except OSError as error:
        raise OutputError(
            f"output={job.output!r} cannot be written: {error.strerror}; use --output NEW_DIRECTORY"
        ) from error
    return lock


def clear_output(path: Path, step: int) -> None:
    """Remove what an earlier run of the same job left, once it is known from which step this one goes on.

    Not before: a checkpoint that turns out damaged as it is read must not cost the model that was exported before.
    """
    for name in _RESULTS if step else _RESULTS + _RECORDS:
        target = path / name
        if target.is_dir():
            shutil.rmtree(target)
        else:
            target.unlink(missing_ok=True)


def write_run(path: Path, content: dict[str, Any]) -> None:
    """Replace run.json in one step. Raises OutputError where it cannot be written."""
    temporary = path / f"{RUN_FILE}.new"
    with writing(path):
        try:
            temporary.write_text(json.dumps(content, indent=1, default=str))
            temporary.replace(path / RUN_FILE)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


def _unused(path: Path) -> bool:
    """Return whether a run has claimed the directory and come to nothing: a mistake must not bind its correction."""
    return _kept_files(path) <= {RUN_FILE}


def _kept_files(path: Path) -> set[str]:
    """Return the names in a directory without those that say nothing of a run: locks, and launchers of its hosts.

    Another host's launcher may be there before the first has claimed the directory; one that was killed leaves its own.
    """
    names = {entry.name for entry in path.iterdir()} - {LOCK_FILE, f"{RUN_FILE}.new"}
    return {name for name in names if not name.startswith(LAUNCHER_PREFIX)}


def _owner(path: Path) -> str | None:
    try:
        return str(json.loads((path / RUN_FILE).read_text())["job_fingerprint"])
    except (OSError, ValueError, KeyError):
        return None
