"""Encodes texts by the tokenizers library alone, in this process or in one that tokenizes for it.

Nothing slow is imported, since each such process imports it anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

Piece = tuple[str, bool]  # its text, and whether it is its document's last


@dataclass(frozen=True)
class TextEncoder:
    """Encodes texts without special tokens around them, as transformers' fast tokenizers do, and without offsets.

    Attributes:
        serialized: the tokenizer as JSON, as `tokenizer.json` holds it.
        split_special_tokens: whether the text of a special token is text like any other.
    """

    serialized: str
    split_special_tokens: bool = False

    @cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_str(self.serialized)
        tokenizer.no_truncation()  # a file may ask for either
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = self.split_special_tokens
        return tokenizer

    def __call__(self, pieces: list[Piece]) -> list[np.ndarray]:
        """Return the number of tokens of each piece [n], and all token ids, one piece behind the other."""
        texts = [text for text, _ in pieces]
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return joined([encoding.ids for encoding in encodings])


def joined(ids: list[list[int]]) -> list[np.ndarray]:
    """Return the lengths of some lists of token ids and their numbers, one list behind the other."""
    lengths = np.array([len(tokens) for tokens in ids], dtype=np.int64)
    return [lengths, np.concatenate([np.empty(0, np.int32), *(np.array(tokens, dtype=np.int32) for tokens in ids)])]
