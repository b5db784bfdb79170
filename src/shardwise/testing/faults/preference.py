"""Faults of preference losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

from shardwise.testing.faults.patching import Fault, wrapped
from shardwise.training import reference
from shardwise.training.objectives import preference
from shardwise.training.objectives.language_modelling import LanguageModelling
from shardwise.training.objectives.preference import DirectPreference


def _moving_reference() -> AbstractContextManager[None]:
    """Let the trained model be its own reference, its adapters included."""

    def wrapper(
        original: Callable[..., Sequence[Any]], self: DirectPreference, microbatches: Sequence[Any], step: int
    ) -> Sequence[Any]:
        with (
            mock.patch.object(self, "reference", reference.FrozenReference(self.model)),
            mock.patch.object(self, "_of_reference", LanguageModelling(self.model)),
            mock.patch.object(reference, "adapters_off", nullcontext),
        ):
            return original(self, microbatches, step)

    return wrapped(DirectPreference, "prepared", wrapper)


def _swapped_pairs() -> AbstractContextManager[None]:
    """Let the rejected completion stand in the place of the chosen one."""
    return wrapped(preference, "log_ratios", lambda original, *args: original(*args)[::-1])


PREFERENCE_FAULTS: dict[str, Fault] = {"reference_not_frozen": _moving_reference, "swapped_pairs": _swapped_pairs}
