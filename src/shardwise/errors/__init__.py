"""Every error a user can cause, by name.

A message holds the key, the value, the rule that was broken and the nearest fix. The command line prints the message
without a traceback and exits with the error's `exit_code` (`shardwise.errors.exit_codes`).
"""

from __future__ import annotations

import reprlib

from shardwise.errors.exit_codes import FAULT, MISTAKE


class ShardwiseError(Exception):
    """Base of all errors that are a user's to fix. `exit_code` is what the command line returns."""

    exit_code: int = MISTAKE


class ConfigError(ShardwiseError):
    """A job's key or value is wrong: unknown key, wrong type, out of range."""


class LegalityError(ConfigError):
    """Each value is fine by itself, their combination is not. `rule` names the row of the legality table."""

    def __init__(self, message: str, rule: str = "") -> None:
        super().__init__(message)
        self.rule = rule


class ModelError(ShardwiseError):
    """A model directory or factory that cannot be read, built or initialized."""


class MissingTokenError(ModelError):
    """A config that lacks a token which the task needs."""


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


class LaunchError(ShardwiseError):
    """A cluster's client that is missing, has no credentials, or refuses a job."""


class CapacityError(ShardwiseError):
    """A model that no layout fits on the cluster it was planned for."""


class UserCodeError(ShardwiseError):
    """A user's own function or class that cannot be imported, takes other arguments, or raises; with file and line."""


class WorkerError(ShardwiseError):
    """A worker failed. The message ends with the first failing rank's own error."""

    exit_code = FAULT


def require_type(value: object, expected: type, argument: str, fix: str) -> None:
    """Refuse the value of a caller's `argument` that is no `expected`.

    Raises:
        ConfigError: it is not; the message ends with `fix`.
    """
    if not isinstance(value, expected):
        raise ConfigError(f"{argument}={reprlib.repr(value)}: must be a {expected.__name__}; {fix}")
