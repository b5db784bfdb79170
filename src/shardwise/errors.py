"""Every error a user can cause, by name.

A message holds the key, the value, the rule that was broken and the nearest fix. The command line prints the message
without a traceback and exits with code 2 (`exit_code`).
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from pathlib import Path


class ShardwiseError(Exception):
    """Base of all errors that are a user's to fix. `exit_code` is what the command line returns."""

    exit_code = 2


class ConfigError(ShardwiseError):
    """A job's key or value is wrong: unknown key, wrong type, out of range."""


class LegalityError(ConfigError):
    """Each value is fine by itself, their combination is not. `rule` names the row of the legality table."""

    def __init__(self, message: str, rule: str = "") -> None:
        super().__init__(message)
        self.rule = rule


class ModelError(ShardwiseError):
    """A model directory or factory that cannot be read, built or initialized."""


class KernelError(ShardwiseError):
    """An attention kernel that is not installed or cannot do what the model asks of it."""


class DataError(ShardwiseError):
    """A corpus, tokenizer or token file that is missing, empty, corrupt or does not fit the model."""


class TableError(ShardwiseError):
    """A table of measurements whose columns are missing or whose values cannot be."""


class OutputError(ShardwiseError):
    """An output directory that cannot be written or that belongs to another job."""


class CheckpointError(ShardwiseError):
    """A checkpoint that is damaged, belongs to another model, or cannot be written."""


class IncompleteError(CheckpointError):
    """A checkpoint that was never finished, which is what a killed run leaves: it may be passed over without a loss."""


class DamagedError(CheckpointError):
    """A checkpoint whose files or manifest are not what was written."""


class MachineError(ShardwiseError):
    """The machine or the launcher's variables do not allow what the job asks for."""


class CapacityError(ShardwiseError):
    """A model that no layout fits on the cluster it was planned for."""


class WorkerError(ShardwiseError):
    """A worker failed. The message ends with the first failing rank's own error."""

    exit_code = 1


def listed(names: Iterable[str], most: int = 4, separator: str = ", ") -> str:
    """The first of `names`, and how many more there are."""
    names = list(names)
    return separator.join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


LISTED = 60  # names that a message lists, at most


def nearest(word: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?` for the closest of `known`, or the list of them when nothing is close."""
    known = sorted(known)
    close = [name for name in known if name.lower() == word.lower()]  # `adamw` is further from AdamW than from Adam
    close = close or difflib.get_close_matches(word, known, n=1, cutoff=0.55)
    return f" Did you mean {close[0]!r}?" if close else f" Known: {listed(known, LISTED)}."


def nearest_file(path: Path, *suffixes: str) -> str:
    """Of a file that is not there: the one beside it with the closest name, or that there is none of these kinds."""
    if not path.parent.is_dir():
        return f" There is no directory {str(path.parent)!r}."
    files = [str(path.parent / name) for name in os.listdir(path.parent) if name.endswith(suffixes)]
    return nearest(str(path), files) if files else f" There is no {' or '.join(suffixes)} file beside it."
