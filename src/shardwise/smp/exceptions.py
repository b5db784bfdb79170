"""Errors of the SMP API; all are errors of shardwise, and the training toolkit may collect them from here."""

from __future__ import annotations

from shardwise.errors import CheckpointError, ConfigError, ModelError, ShardwiseError

__all__ = [
    "CheckpointError",
    "ConfigError",
    "MessageError",
    "ModelError",
    "NotInitializedError",
    "PartitionError",
    "SMPRuntimeError",
    "SMPUnsupportedError",
    "SMPValidationError",
    "StepUsageError",
]


class SMPRuntimeError(ShardwiseError):
    """Base of what goes wrong while a script runs."""


class NotInitializedError(SMPRuntimeError):
    """Something was asked before `smp.init()`."""


class StepUsageError(SMPRuntimeError):
    """`model(...)`, `model.backward(...)` or a step was used where it cannot work."""


class PartitionError(SMPRuntimeError):
    """A module cannot be put where it was asked to go."""


class MessageError(SMPRuntimeError):
    """A message was not answered, or not by whom it should be."""


class SMPValidationError(SMPRuntimeError, ValueError):
    """An argument's value is outside of what is allowed."""


class SMPUnsupportedError(SMPRuntimeError):
    """A name of SMP's that is there and cannot be had."""
