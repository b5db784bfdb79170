"""Token ids of a corpus' rows and which of them are trained on, group by group in the order of the corpus.

Each group is checked, rendered by the chat template and tokenized in the process that has it. Used by
`shardwise.data.row_cache`; `parallel_tokenize` has the processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shardwise.data.chat_template import ChatTemplate, TokenizedRow
from shardwise.data.conversations import (
    COLUMNS,
    Conversation,
    TextPair,
    chat,
    preference,
    prompt_completion,
    texts_of,
)
from shardwise.data.corpus import Corpus
from shardwise.data.packed_rows import NO_TARGET
from shardwise.data.parallel_tokenize import PartStore, grouped, usable_cores
from shardwise.data.readers import Row
from shardwise.data.split import document_hash
from shardwise.data.tokenized_text import least_characters
from shardwise.data.tokenizer import TokenizerSource, load_tokenizer
from shardwise.errors import DataError

if TYPE_CHECKING:
    from shardwise.data.tokenize_progress import TokenizeProgress

ROW_CHARACTERS = 500  # a row takes to render what so many characters take to tokenize
# With fewer groups, starting processes takes longer than it saves: each imports transformers, and PyTorch with it.
FEWEST_GROUPS = 16
READERS: dict[str, Callable[[str, Any], Conversation | TextPair]] = {
    "chat": chat,
    "prompt_completion": prompt_completion,
    "preference": lambda where, row: preference(where, row).chosen,
}


class RowArrays(NamedTuple):
    """The arrays of a group of rows; a pair of preferences is two rows."""

    lengths: np.ndarray  # of each row [R], in tokens
    tokens: np.ndarray  # token ids of all rows, one row behind the other
    trained: np.ndarray  # 1 for each token that is trained on
    hashes: np.ndarray  # `document_hash` of each row [R]
    first_targets: np.ndarray  # as of `RowCorpus`, [R]
    targets: np.ndarray  # labels of each row that count, [R]


@dataclass(frozen=True)
class RowEncoder:
    """Checks, renders and tokenizes rows.

    Attributes:
        source: of the tokenizer.
        template: in the place of the tokenizer's own.
        train_on: as of `ChatTemplate`.
        format: of the rows.
        in_pairs: whether both completions of a preference are trained on.
    """

    source: TokenizerSource
    template: str | None
    train_on: str
    format: str
    in_pairs: bool

    @cached_property
    def renderer(self) -> ChatTemplate:
        """The tokenizer and its template, opened once in each process."""
        return ChatTemplate(load_tokenizer(self.source), self.source, self.template, self.train_on)

    def __reduce__(self) -> tuple[type[RowEncoder], tuple[object, ...]]:
        return RowEncoder, (self.source, self.template, self.train_on, self.format, self.in_pairs)

    def __call__(self, rows: list[Row]) -> list[np.ndarray]:
        """Return the arrays of `RowArrays`."""
        tokenized = list(self.renderer.tokenized(self._completions(rows)))
        if self.in_pairs:
            _refuse_equal(tokenized)
        return list(_joined(tokenized))

    def _completions(self, rows: list[Row]) -> Iterator[Conversation | TextPair]:
        """Yield what is rendered and tokenized of each row; of a pair both completions."""
        for where, row in rows:
            if self.in_pairs:
                yield from preference(where, row)
            else:
                yield READERS[self.format](where, row)


def tokenized_rows(corpus: Corpus, encoder: RowEncoder, parts: Path, progress: TokenizeProgress) -> Iterator[RowArrays]:
    """Yield the arrays of each group of rows; `parts` is kept where this is cut off."""
    store: PartStore[Row] = PartStore(encoder, parts, usable_cores(), FEWEST_GROUPS)
    rows: Iterator[Row] = (
        (where, {name: row[name] for name in COLUMNS if name in row}) for where, row in corpus.rows(COLUMNS)
    )
    groups = grouped(rows, _size, least_characters(corpus))
    for _, arrays in store.encoded(progress.read_ahead(groups)):
        progress.next_group(store.is_reused)
        yield RowArrays(*arrays)


def _size(row: Row) -> int:
    return ROW_CHARACTERS + sum(map(len, texts_of(row[1])))


def _refuse_equal(rows: list[TokenizedRow]) -> None:
    """Refuse a pair whose completions are written otherwise, and have the same tokens.

    Raises:
        DataError: with its place.
    """
    for chosen, rejected in zip(rows[::2], rows[1::2], strict=True):
        if np.array_equal(chosen.ids, rejected.ids):
            raise DataError(
                f"{chosen.where}: chosen and rejected have the same tokens, which prefers nothing; remove the row"
            )


def _joined(rows: list[TokenizedRow]) -> RowArrays:
    targets = [np.flatnonzero(row.trained[1:]) + 1 for row in rows]  # no position has the first token as its label
    firsts = [int(places[0]) if len(places) else NO_TARGET for places in targets]
    return RowArrays(
        lengths=np.array([len(row.ids) for row in rows], dtype=np.int64),
        tokens=np.concatenate([np.empty(0, np.int32), *(row.ids.astype(np.int32) for row in rows)]),
        trained=np.concatenate([np.empty(0, np.uint8), *(row.trained.astype(np.uint8) for row in rows)]),
        hashes=np.array([_hash(row.ids) for row in rows], dtype=np.uint64),
        first_targets=np.array(firsts, dtype=np.int64),
        targets=np.array([len(places) for places in targets], dtype=np.int64),
    )


def _hash(ids: np.ndarray) -> int:
    content = document_hash()
    content.update(ids.astype("<i4").tobytes())
    return content.intdigest()
