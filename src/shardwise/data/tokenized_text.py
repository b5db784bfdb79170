"""Token ids of a corpus' text, piece by piece in its order, many pieces in one call of the tokenizer.

Used by `shardwise.data.prepare`; `parallel_tokenize` has the processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardwise.data.corpus import Corpus
from shardwise.data.parallel_tokenize import PartStore, grouped, usable_cores
from shardwise.data.text_encoder import Piece, TextEncoder, joined
from shardwise.data.tokenize_worker import Encoder
from shardwise.data.tokenizer import TokenizerSource, encode, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from shardwise.data.tokenize_progress import TokenizeProgress

GROUP_CHARACTERS = 1 << 20  # text of a part, at least
FEWEST_GROUPS = 4  # with fewer, starting processes takes longer than it saves
MOST_PARTS = 4096  # from which on parts are larger
LARGEST_GROUP = 1 << 24


@dataclass(frozen=True)
class SlowTextEncoder:
    """Encodes texts by a tokenizer that is Python, or does more than the tokenizers library, through transformers."""

    source: TokenizerSource

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self.source)

    def __call__(self, pieces: list[Piece]) -> list[np.ndarray]:
        """Return the same as `TextEncoder`."""
        return joined(encode(self._tokenizer, [text for text, _ in pieces]))


def text_encoder(tokenizer: PreTrainedTokenizerBase, source: TokenizerSource) -> Encoder:
    """Return what encodes as `tokenizer` does: by the tokenizers library alone, unless it does something besides."""
    from transformers import PreTrainedTokenizerFast

    kind: Any = type(tokenizer)
    plain: Any = PreTrainedTokenizerFast
    changed = any(getattr(kind, name, None) is not getattr(plain, name) for name in ("__call__", "_encode_plus"))
    if not tokenizer.is_fast or changed:
        return SlowTextEncoder(source)
    backend: Any = tokenizer.backend_tokenizer  # type: ignore[attr-defined]
    try:
        return TextEncoder(backend.to_str(), bool(tokenizer.split_special_tokens))
    except Exception:  # whatever tokenizers raises for a part that is a Python object
        return SlowTextEncoder(source)


def tokenized_pieces(
    corpus: Corpus, tokenizer: PreTrainedTokenizerBase, source: TokenizerSource, parts: Path, progress: TokenizeProgress
) -> Iterator[tuple[np.ndarray, bool]]:
    """Yield (token ids, is the document's last piece) of the corpus; `parts` is kept where this is cut off."""
    store: PartStore[Piece] = PartStore(text_encoder(tokenizer, source), parts, usable_cores(), FEWEST_GROUPS)
    for group, (lengths, ids) in store.encoded(progress.read_ahead(groups(corpus))):
        progress.next_group(store.is_reused)
        ends = np.cumsum(lengths)
        for start, end, (_, last) in zip(ends - lengths, ends, group, strict=True):
            yield ids[start:end], last


def groups(corpus: Corpus) -> Iterator[list[Piece]]:
    """Yield the pieces of a corpus in groups, which are the same each time."""
    return grouped(corpus.texts(), lambda piece: len(piece[0]), least_characters(corpus))


def least_characters(corpus: Corpus) -> int:
    """Return the characters of a group, at least."""
    return min(max(GROUP_CHARACTERS, corpus.size // MOST_PARTS), LARGEST_GROUP)
