"""Faults of what is trained on in rows of conversations and pairs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from shardwise.data.packed_rows import PackedRows
from shardwise.job.tasks import IGNORED
from shardwise.testing.faults.patching import Fault, wrapped


def _labels_with(change: Callable[[np.ndarray], np.ndarray]) -> Fault:
    """Change which positions [n] of a row have the token behind them as their label."""

    def wrapper(original: Callable[..., Any], self: PackedRows, number: int) -> tuple[np.ndarray, np.ndarray]:
        ids, labels = original(self, number)
        trained = change(labels != IGNORED)
        trained[-1] = False
        return ids, np.where(trained, np.roll(ids, -1), IGNORED)

    def fault() -> AbstractContextManager[None]:
        return wrapped(PackedRows, "row", wrapper)

    return fault


ROW_FAULTS: dict[str, Fault] = {
    "trained_prompt": _labels_with(np.ones_like),
    "shifted_mask": _labels_with(lambda trained: np.roll(trained, -1)),
}
