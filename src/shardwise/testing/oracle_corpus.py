"""The cached tokens against the corpus itself: the first documents, read and tokenized once more in the plainest way.

Shared with the engine are the list of files and how a compressed one is opened; lines are parsed, texts encoded and
documents ended here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
from transformers import AutoTokenizer

from shardwise.data.compressed import opened_text
from shardwise.data.corpus import Corpus, find_corpus
from shardwise.data.shared_manifest import find_shared
from shardwise.job.objects import load_object
from shardwise.job.schema import Job
from shardwise.testing.comparison import Difference

DOCUMENTS = 20  # that are looked at
LARGEST = 1 << 14  # characters of a document that is; longer ones are passed over
LONG = -1  # stands for the ids of a document that is passed over


def compare_corpus(job: Job, directory: str | None, tokenizer_directory: str | None) -> list[Difference]:
    """Compare the first documents of the cache in `directory` with the files of `data.path`; nothing of other kinds."""
    is_stream_or_rows = job.data.has_rows or job.data.streaming
    has_no_files = directory is None or is_stream_or_rows or find_shared(job.data) is not None
    corpus = None if has_no_files else find_corpus(job.data)
    if directory is None or corpus is None or corpus.container not in ("text", "jsonl"):
        return []
    tokenizer: Any = None if tokenizer_directory is None else AutoTokenizer.from_pretrained(tokenizer_directory)
    expected = (_with_end(document, tokenizer) for document in _documents(corpus, job.data.filter))
    pairs = zip(filter(None, expected), _cached_documents(Path(directory)), strict=False)
    wrong = [(number, own, right) for number, (right, own) in enumerate(pairs) if own != right and right != [LONG]]
    sentence = ""
    if wrong:
        number, own, right = wrong[0]
        sentence = f"document {number} of the corpus has other tokens in the cache: {_first_difference(own, right)}"
    return [Difference(0, "corpus", sentence, math.inf if sentence else 0.0, 0.0)]


def is_kept(row: dict[str, Any], wanted: Any) -> bool:
    """Tell whether `data.filter` keeps a row."""
    if isinstance(wanted, str):
        return bool(load_object(wanted)(row))
    for column, wish in (wanted or {}).items():
        value = row.get(column)
        allowed = [wish] if not isinstance(wish, list | dict) else wish
        if isinstance(allowed, dict):
            low, high = allowed.get("min", -math.inf), allowed.get("max", math.inf)
            inside = type(value) in (int, float) and low <= value <= high
        else:
            inside = any(value == one and (type(value) is bool) == (type(one) is bool) for one in allowed)
        if not inside:
            return False
    return True


def _documents(corpus: Corpus, wanted: Any) -> Iterator[str | list[int]]:
    """Yield documents that hold something: text, or token ids."""
    for path in corpus.files:
        with opened_text(path, newline="") as stream:
            if corpus.container == "text":
                text = stream.read(LARGEST + 1)
                yield from [text] if text else []
                continue
            for line in stream:
                row = json.loads(line) if line.strip() else {}
                if not is_kept(row, wanted):
                    continue
                value = row.get("input_ids" if corpus.format == "tokens" else corpus.column)
                yield from [value] if value else []


def _with_end(document: str | list[int], tokenizer: Any) -> list[int]:
    """Return the ids of a document and of what ends it, the end of a text or a separator; LONG of one too long."""
    if len(document) > LARGEST:
        return [LONG]
    ids = list(tokenizer(document, add_special_tokens=False)["input_ids"]) if isinstance(document, str) else document
    if tokenizer is None or not ids:
        return ids
    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
    return ids if end is None or ids[-1:] == [end] else [*ids, end]


def _cached_documents(directory: Path) -> Iterator[list[int]]:
    tokens, starts = (_column(directory / name) for name in ("tokens.arrow", "documents.arrow"))
    bounds = [*starts.slice(0, DOCUMENTS + 1).to_pylist(), len(tokens)][: DOCUMENTS + 1]
    for first, end in pairwise(bounds):
        yield tokens.slice(first, end - first).to_pylist()


def _first_difference(own: list[int], expected: list[int]) -> str:
    if len(own) != len(expected):
        return f"{len(own)} tokens, not {len(expected)}"
    place = next(place for place, pair in enumerate(zip(own, expected, strict=True)) if pair[0] != pair[1])
    return f"token {place} is {own[place]}, not {expected[place]}"


def _column(path: Path) -> pa.ChunkedArray:
    with pa.memory_map(str(path)) as file:
        return pa.ipc.open_stream(file).read_all().column(0)
