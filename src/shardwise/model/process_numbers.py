"""Notices draws from Python's and NumPy's generators, of which every process has its own."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np


@contextmanager
def process_numbers_kept() -> Iterator[Callable[[], bool]]:
    """Yield a function that tells whether numbers were drawn inside; the generators are as before outside."""
    python, numpy = random.getstate(), np.random.get_state()

    def were_drawn() -> bool:
        return random.getstate() != python or pickle.dumps(np.random.get_state()) != pickle.dumps(numpy)

    try:
        yield were_drawn
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
