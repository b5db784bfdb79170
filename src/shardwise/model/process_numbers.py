"""Notices draws from Python's and NumPy's generators, of which every process has its own."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np


@contextmanager
def process_numbers_kept() -> Iterator[Callable[[], bool]]:
    """Yield a function that tells whether numbers were drawn inside; the generators are as before outside."""
    python, numpy = random.getstate(), np.random.get_state()
    position = _position_of_numpy()
    try:
        yield lambda: random.getstate() != python or _position_of_numpy() != position
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _position_of_numpy() -> tuple[Any, ...]:
    """Return what changes in NumPy's generator with each draw."""
    state: Any = np.random.get_state(legacy=False)
    return state["state"]["pos"], state["state"]["key"].tobytes(), state["has_gauss"]
