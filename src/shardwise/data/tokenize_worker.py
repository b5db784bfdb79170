"""A process that tokenizes for another: `python -m shardwise.data.tokenize_worker`, started by `parallel_tokenize`.

It reads from stdin what the process that started it writes there: an encoder, then the name of a part and what is in
it, again and again; and writes each part to its file and a word on it to stdout. It ends when stdin does, so that it
does not outlive that process by more than a part.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.data.parts import write_part
from shardwise.errors import DataError

Encoder = Callable[[Any], list[np.ndarray]]


def run_worker() -> None:
    """Tokenize part after part."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the process that started this one acts
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what code of a tokenizer prints is no answer
    try:
        encoder: Encoder = pickle.load(sys.stdin.buffer)
        while True:
            path, content = pickle.load(sys.stdin.buffer)
            answers.write(pickle.dumps(_tokenize(encoder, path, content)))
    except (EOFError, BrokenPipeError):
        return


def _tokenize(encoder: Encoder, path: Path, content: bytes) -> str | None:
    """Write a part, and return what is wrong with it, for the user; None where nothing is."""
    try:
        write_part(path, encoder(pickle.loads(content)))
    except DataError as error:
        return str(error)
    return None


if __name__ == "__main__":
    run_worker()
