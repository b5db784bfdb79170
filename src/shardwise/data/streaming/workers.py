"""A worker process that tokenizes parts of a stream. It opens no file but the tokenizer's, and ends with its parent."""

from __future__ import annotations

import io
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shardwise.data.readers import pieces
from shardwise.data.streaming.definition import StreamDefinition
from shardwise.data.streaming.rows import Value

if TYPE_CHECKING:
    from tokenizers import Tokenizer

WATCH = 0.2


class Encoder:
    """Token ids of documents, with what `tokenizer.json` says and nothing else."""

    def __init__(self, definition: StreamDefinition, tokenizer: Path) -> None:
        self.definition = definition
        self.tokenizer = None if definition.holds_tokens else _open(tokenizer)

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
        cut = [[text for text, _ in pieces(io.StringIO(text, newline=""))] for text in texts]
        encodings = self.tokenizer.encode_batch([piece for document in cut for piece in document], False, False)
        ids = iter([encoding.ids for encoding in encodings])
        return [np.array([id for _ in document for id in next(ids)], dtype=np.int32) for document in cut]

    def _ended(self, ids: np.ndarray) -> np.ndarray:
        end = self.definition.end
        ids = ids.astype(np.int32)
        return np.append(ids, np.int32(end)) if len(ids) and end is not None and ids[-1] != end else ids


def _open(path: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


_encoder: Encoder | None = None  # of this process


def begin_worker(definition: StreamDefinition, tokenizer: Path) -> None:
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
