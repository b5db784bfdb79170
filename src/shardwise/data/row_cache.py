"""Token caches of conversations and pairs: rows through the chat template into columns, once, and opened from there.

Where preferences are trained on as such, a pair is two rows of the cache, one behind the other: chosen and rejected.

The cache holds every row whole, with the mask of what is trained on; which rows stay, and in which sequences, is
decided when it is opened (`shardwise.data.packed_rows`), so that another sequence length needs no new cache.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.cache import cache_root
from shardwise.data.chat_template import ChatTemplate, TokenizedRow, read_template
from shardwise.data.conversations import COLUMNS, Conversation, TextPair, chat, preference, prompt_completion
from shardwise.data.corpus import Corpus
from shardwise.data.packed_rows import NO_TARGET, RowCorpus, RowSettings, split_rows
from shardwise.data.split import document_hash, split_rule
from shardwise.data.store import COMPLETE, Column, ColumnWriter, build_once, digest
from shardwise.data.token_data import TokenData
from shardwise.data.tokenizer import TokenizerSource, check_vocabulary, load_tokenizer
from shardwise.errors import DataError
from shardwise.job.schema import Job

Say = Callable[[str], None]

VERSION = 1  # of the cached layout and of how rows are rendered; part of the cache key
REPORTED_ROWS = 20_000  # between two words on the progress
# The columns, in the order of RowCorpus, and their dtypes.
FILES: dict[str, type[np.integer[Any]]] = {
    "tokens.arrow": np.int32,
    "trained.arrow": np.uint8,
    "starts.arrow": np.int64,
    "hashes.arrow": np.uint64,
    "first_targets.arrow": np.int64,
}
READERS: dict[str, Callable[[str, Any], Conversation | TextPair]] = {
    "chat": chat,
    "prompt_completion": prompt_completion,
    "preference": lambda where, row: preference(where, row).chosen,
}
PAIRS = "pairs"  # in the key of a cache that holds both completions of preferences


def prepare_rows(
    job: Job, corpus: Corpus, source: TokenizerSource, model_vocabulary: int | None, say: Say
) -> TokenData:
    """Return the rows of a job of conversations, rendered and tokenized now unless the cache has them."""
    template = read_template(job.data)
    pairs = (PAIRS,) if job.reads_pairs else ()
    key = digest(VERSION, corpus.identity, source.identity, template, job.data.trained_part, *pairs)
    directory = cache_root(job.data.cache_directory) / "rows" / key
    if (directory / COMPLETE).is_file():
        say(f"tokens of {corpus.describe()} are cached in {directory}")
    build_once(directory, lambda target: _build(target, job, corpus, source, template, say), say)
    return _open(directory, job, source, model_vocabulary)


def _open(directory: Path, job: Job, source: TokenizerSource, model_vocabulary: int | None) -> TokenData:
    try:
        known = json.loads((directory / COMPLETE).read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"cached data {directory} cannot be read ({error}); delete it") from error
    check_vocabulary(known["vocabulary_size"], model_vocabulary, source.directory)
    data = job.data
    together = 2 if job.reads_pairs else 1
    settings = RowSettings(data.sequence_length, data.packing, data.truncation, known["padding_id"], together)
    corpus = RowCorpus(*(Column(directory / name) for name in FILES))
    rule = split_rule(data)
    train, validation, counts = split_rows(corpus, rule, data.validation_fraction, job.training.seed, settings)
    return TokenData(
        train=train,
        validation=validation,
        corpus=known["corpus"],
        documents=len(corpus.starts) // together,
        tokens=len(corpus.tokens),
        vocabulary_size=known["vocabulary_size"],
        split=rule,
        tokenizer_directory=str(source.directory),
        eos_id=known["eos_id"],
        content=known["content"],
        directory=str(directory),
        row_counts=counts,
    )


def _build(target: Path, job: Job, corpus: Corpus, source: TokenizerSource, template: str | None, say: Say) -> None:
    """Write the columns and their description into `target`."""
    tokenizer = load_tokenizer(source)
    renderer = ChatTemplate(tokenizer, source, template, job.data.trained_part)
    say(f"rendering and tokenizing {corpus.describe()}")
    known = _write_columns(target, renderer.tokenized(_completions(corpus, job.reads_pairs)), say)
    if not known["rows"]:
        raise DataError(f"data.path={corpus.path!r} holds no row ({corpus.describe()}); give a path with rows")
    if not known["rows_with_target"]:
        raise DataError(
            f"data.path={corpus.path!r}: none of {known['rows']:,} rows has a token that is trained on "
            f"(data.train_on={job.data.trained_part}); check the roles of its messages, and that the chat template's "
            "{% generation %} blocks stand around what the assistant says"
        )
    end = tokenizer.eos_token_id
    padding = next((number for number in (tokenizer.pad_token_id, end) if number is not None), 0)
    known |= {
        "corpus": corpus.describe(),
        "vocabulary_size": max(tokenizer.get_vocab().values(), default=-1) + 1,
        "eos_id": end,
        "padding_id": padding,
    }
    rows = known["rows"] // (2 if job.reads_pairs else 1)
    say(f"{rows:,} rows, {known['tokens']:,} tokens, {known['trained']:,} of them trained on")
    (target / COMPLETE).write_text(json.dumps(known))


def _completions(corpus: Corpus, in_pairs: bool) -> Iterator[Conversation | TextPair]:
    """Yield what is rendered and tokenized of each row; of a pair both completions."""
    for where, row in corpus.rows(COLUMNS):
        if in_pairs:
            yield from preference(where, row)
        else:
            yield READERS[corpus.format](where, row)


def _write_columns(target: Path, rows: Iterator[TokenizedRow], say: Say) -> dict[str, Any]:
    trained = with_target = 0
    tokens, masks, starts, hashes, first_targets = writers = [
        ColumnWriter(target / name, dtype) for name, dtype in FILES.items()
    ]
    with tokens, masks, starts, hashes, first_targets:
        for row in rows:
            starts.extend([tokens.length])
            tokens.extend(row.ids)
            masks.extend(row.trained)
            row_hash = document_hash()
            row_hash.update(row.ids.astype("<i4").tobytes())
            hashes.extend([row_hash.intdigest()])
            targets = np.flatnonzero(row.trained[1:]) + 1  # no position has the first token as its label
            first_targets.extend([int(targets[0]) if len(targets) else NO_TARGET])
            trained += len(targets)
            with_target += bool(len(targets))
            if starts.length % REPORTED_ROWS == 0:
                say(f"tokenizing: {starts.length:,} rows, {tokens.length:,} tokens")
    return {
        "rows": starts.length,
        "rows_with_target": with_target,
        "tokens": tokens.length,
        "trained": trained,
        "content": digest(*(writer.digest for writer in writers)),
    }
