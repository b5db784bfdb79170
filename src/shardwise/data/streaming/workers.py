"""A worker process that tokenizes parts of a stream. It opens no file, and ends with its parent."""

from __future__ import annotations

import io
import os
import signal
import threading
import time
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from shardwise.data.readers import pieces
from shardwise.data.streaming.definition import StreamDefinition
from shardwise.data.streaming.rows import Value
from shardwise.data.text_encoder import TextEncoder

WATCH = 0.2


class Encoder:
    """Token ids of documents; `tokenizer` is None where rows hold them."""

    def __init__(self, definition: StreamDefinition, tokenizer: TextEncoder | None) -> None:
        self.definition, self.tokenizer = definition, tokenizer

    def encode(self, values: Sequence[Value]) -> list[tuple[np.ndarray, bool]]:
        """Return of each document its ids, ended, and whether it is held out; one without ids stays empty."""
        if self.definition.holds_tokens:
            documents = [np.asarray(value) for value in values]
        else:
            documents = self._tokenized([str(value) for value in values])
        ended = [self._ended(ids) for ids in documents]
        return [(ids, bool(len(ids)) and self.definition.is_held_out(ids)) for ids in ended]

    def _tokenized(self, texts: list[str]) -> list[np.ndarray]:
        assert self.tokenizer is not None
        cut = [list(pieces(io.StringIO(text, newline=""))) for text in texts]
        lengths, ids = self.tokenizer([piece for document in cut for piece in document])
        ends = np.concatenate([[0], np.cumsum(lengths)])[np.cumsum([0, *map(len, cut)])]
        return [ids[start:end] for start, end in pairwise(ends)]

    def _ended(self, ids: np.ndarray) -> np.ndarray:
        end = self.definition.end
        ids = ids.astype(np.int32)
        return np.append(ids, np.int32(end)) if len(ids) and end is not None and ids[-1] != end else ids


_encoder: Encoder | None = None  # of this process


def begin_worker(definition: StreamDefinition, tokenizer: TextEncoder | None) -> None:
    """Make this process a worker: signals are its parent's to answer, and it does not outlive it."""
    global _encoder
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    _encoder = Encoder(definition, tokenizer)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(WATCH)
    os._exit(1)


def encode_values(values: Sequence[Value]) -> list[tuple[np.ndarray, bool]]:
    """Return what the worker's encoder makes of documents."""
    assert _encoder is not None
    return _encoder.encode(values)
