"""The checkpoints of one store: which are there, which are complete, which may go."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from shardwise.checkpoint.manifest import FILE, OLDER, Manifest, NewerError, parse
from shardwise.checkpoint.stores import DIRECTORY, Store, open_store, split
from shardwise.errors import CheckpointError, DamagedError, IncompleteError
from shardwise.job.schema import CheckpointSection, EvaluationSection

PREFIX = "step-"
RUN_FILE = "run.json"  # in the output directory of a run; training/output.py writes it


def checkpoint_name(step: int) -> str:
    """Directory of the checkpoint after `step` steps."""
    return f"{PREFIX}{step:08d}"


def checkpoints(store: Store) -> list[str]:
    """Names with the form of a checkpoint, newest first; complete or not.

    Raises:
        CheckpointError: the store cannot be read.
    """
    try:
        names = store.names()
    except OSError as error:
        raise CheckpointError(f"{store.root} cannot be read: {error}") from error
    return sorted(filter(_has_form, names), key=_step, reverse=True)


def _has_form(name: str) -> bool:
    return name.startswith(PREFIX) and name.removeprefix(PREFIX).isdecimal()


def _step(name: str) -> int:
    return int(name.removeprefix(PREFIX))


def manifest_alone(store: Store, name: str) -> Manifest:
    """The manifest of a checkpoint, whatever has become of its files.

    Raises:
        IncompleteError: there is none, or no checkpoint.
        DamagedError: it is not as it was written.
        CheckpointError: it is unreadable or of a newer version, and why.
    """
    where = f"{store.root}/{name}"
    try:
        return parse(store.read(name, FILE), f"{where}/{FILE}")
    except FileNotFoundError:
        if not _is_there(store, name):
            raise IncompleteError(f"{where} does not exist; `shardwise checkpoint ls` says what there is") from None
        raise IncompleteError(
            f"{where} is not a complete checkpoint: it has no {FILE}, which is written last; "
            f"a killed run leaves that{OLDER}"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{where} cannot be read: {error}") from error


def _is_there(store: Store, name: str) -> bool:
    """Return whether anything lies under a checkpoint's name; an object store has no empty directories."""
    try:
        return bool(store.sizes(name)) or name in store.names()
    except OSError:
        return False


def read_manifest(store: Store, name: str) -> Manifest:
    """The manifest of a checkpoint whose files are all there, in their right sizes; their bytes are not read.

    Raises:
        CheckpointError: as `manifest_alone`; a file that is missing or cut short is damage.
    """
    where, manifest = f"{store.root}/{name}", manifest_alone(store, name)
    try:
        sizes = store.sizes(name)
    except OSError as error:
        raise CheckpointError(f"{where} cannot be read: {error}") from error
    for file, record in manifest.files.items():
        if sizes.get(file) != record.bytes:
            there = "is missing" if file not in sizes else f"has {sizes[file]} of {record.bytes} bytes"
            raise DamagedError(f"{where}: {file} {there}; it holds {manifest.held(file, 0, record.bytes)}{OLDER}")
    return manifest


def named_checkpoint(path: str) -> tuple[Store, str, Manifest]:
    """The checkpoint that `checkpoint.resume` names: its store, its name there and its manifest.

    Raises:
        CheckpointError: as `read_manifest`; the message begins with the key.
    """
    root, name = split(path)
    store = open_store(root)
    try:
        return store, name, read_manifest(store, name)
    except CheckpointError as error:
        raise type(error)(f"checkpoint.resume={path!r}: {error}") from error


def complete(store: Store, say: Callable[[str], None] = lambda text: None) -> Iterator[tuple[str, Manifest]]:
    """Complete checkpoints, newest first; says which are passed over and why.

    Raises:
        NewerError: one is of a newer version of shardwise.
        DamagedError: none is complete, though some were written to their end. Who started over would lose them.
    """
    lost: dict[str, str] = {}
    any_complete = False
    for name in checkpoints(store):
        try:
            manifest = read_manifest(store, name)
        except NewerError:
            raise
        except CheckpointError as error:
            say(f"checkpoint {name} is passed over: {error}")
            if not isinstance(error, IncompleteError):
                lost[name] = str(error)
        else:
            any_complete = True
            yield name, manifest
    if lost and not any_complete:
        raise none_left(store, lost.values())


def none_left(store: Store, problems: Iterable[str]) -> DamagedError:
    """The error for a store in which no checkpoint can be gone on from, and what became of each."""
    reasons = "".join(f"\n  {problem.removesuffix(OLDER)}" for problem in problems)
    return DamagedError(
        f"{store.root} holds checkpoints, and none that is whole:{reasons}\nput their files back, or start over with "
        "another --output, or after removing them"
    )


def find(path: str, say: Callable[[str], None] = lambda text: None) -> tuple[Store, str]:
    """The checkpoint at `path`, a directory or URL: it, or the newest complete one of a directory of them or of a run.

    Raises:
        CheckpointError: there is none.
    """
    if is_checkpoint(path):
        root, name = split(path)
        return open_store(root), name
    store = find_store(path)
    newest = next(complete(store, say), None)
    if newest is None:
        raise CheckpointError(
            f"{store.root} holds no complete checkpoint; `shardwise checkpoint ls` says what there is"
        )
    say(f"the newest complete checkpoint of {store.root} is {newest[0]}")
    return store, newest[0]


def is_checkpoint(path: str) -> bool:
    """Return whether `path` is one checkpoint: by its name, or because it holds a manifest."""
    root, name = split(path)
    if not name or name in (".", ".."):
        return False
    if _has_form(name):
        return True
    try:
        return bool(open_store(root).read(name, FILE))
    except OSError:
        return False


def find_store(path: str) -> Store:
    """The checkpoints in `path`: a directory of them or the output directory of a run.

    Raises:
        CheckpointError: there are none.
    """
    places = [path.rstrip("/") or "/", f"{path.rstrip('/')}/{DIRECTORY}", *_elsewhere(path)]
    if path.endswith("://"):
        places[0] = path
    for store in map(open_store, places):
        if checkpoints(store) or store.unfinished():
            return store
    raise CheckpointError(
        f"{path} holds no checkpoints; give a checkpoint, the directory that holds them, or a run's output directory"
    )


def _elsewhere(path: str) -> list[str]:
    """Return the places outside of an output directory where its run keeps checkpoints."""
    try:
        written = json.loads((Path(path) / RUN_FILE).read_text(encoding="utf-8"))["job"]["checkpoint"]["directory"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [written] if isinstance(written, str) else []


class Retention:
    """The checkpoints that stay: the newest, the multiples of `keep_every`, the one of the best `evaluation.metric`.

    What was resumed from and what others wrote is judged by the same rule. Incomplete ones are left alone: they are
    evidence, and never the one that a run resumes from.
    """

    def __init__(self, settings: CheckpointSection, evaluation: EvaluationSection) -> None:
        self.settings, self.evaluation = settings, evaluation
        self._metrics: dict[str, float | None] = {}

    def surplus(self, store: Store, newest: str) -> list[str]:
        """Names that may be removed now that `newest` is complete.

        What is ahead of it was passed over, for damage that sizes need not show: it may not take a whole one's place.
        """
        self._metrics.pop(newest, None)  # a step that is saved again may be judged anew
        names = [name for name in checkpoints(store) if _step(name) <= _step(newest) and self._known(store, name)]
        kept = set(names[: self.settings.keep_last])
        if self.settings.keep_every:
            kept |= {name for name in names if _step(name) % self.settings.keep_every == 0}
        sign = -1 if self.evaluation.prefers_greater else 1
        known = {
            name: metric for name in names if (metric := self._metrics[name]) is not None and math.isfinite(metric)
        }
        if self.settings.keep_best and known:
            kept.add(min((sign * metric, name) for name, metric in known.items())[1])
        return [name for name in names if name not in kept]

    def _known(self, store: Store, name: str) -> bool:
        if name not in self._metrics:
            try:
                progress, wanted = read_manifest(store, name).progress, self.evaluation.metric
                of_metric = progress.metric if progress.judged_by == wanted else None
                self._metrics[name] = progress.validation_loss if wanted == "validation_loss" else of_metric
            except CheckpointError:
                return False
        return True
