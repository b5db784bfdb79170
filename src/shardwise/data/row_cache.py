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
from shardwise.data.chat_template import read_template
from shardwise.data.corpus import Corpus
from shardwise.data.packed_rows import RowCorpus, RowSettings, split_rows
from shardwise.data.parallel_tokenize import parts_removed_if_refused, remove_parts
from shardwise.data.split import split_rule
from shardwise.data.store import COMPLETE, Column, ColumnWriter, build_once, digest
from shardwise.data.token_data import TokenData
from shardwise.data.tokenize_progress import TokenizeProgress
from shardwise.data.tokenized_rows import RowArrays, RowEncoder, tokenized_rows
from shardwise.data.tokenizer import TokenizerSource, check_vocabulary
from shardwise.errors import DataError
from shardwise.job.schema import Job

Say = Callable[[str], None]

VERSION = 2  # of the cached layout and of how rows are rendered; part of the cache key
# The columns, in the order of RowCorpus, and their dtypes.
FILES: dict[str, type[np.integer[Any]]] = {
    "tokens.arrow": np.int32,
    "trained.arrow": np.uint8,
    "starts.arrow": np.int64,
    "hashes.arrow": np.uint64,
    "first_targets.arrow": np.int64,
}
PAIRS = "unequal pairs"  # in the key of a cache that holds both completions of preferences


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
    encoder = RowEncoder(source, template, job.data.trained_part, corpus.format, job.reads_pairs)
    parts = directory.with_name(f"{key}.parts")
    build_once(directory, lambda target: _build(target, parts, corpus, encoder, say), say)
    remove_parts(parts)
    return open_rows(directory, job, source, model_vocabulary)


def open_rows(directory: Path, job: Job, source: TokenizerSource, model_vocabulary: int | None) -> TokenData:
    """Return the rows of a complete cached directory; reads no corpus."""
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


def _build(target: Path, parts: Path, corpus: Corpus, encoder: RowEncoder, say: Say) -> None:
    """Write the columns and their description into `target`; `parts` stays where this is cut off."""
    tokenizer, together = encoder.renderer.tokenizer, 2 if encoder.in_pairs else 1
    say(f"rendering and tokenizing {corpus.describe()}")
    with TokenizeProgress(corpus.size, "rows", say) as progress, parts_removed_if_refused(parts):
        known = _write_columns(target, tokenized_rows(corpus, encoder, parts, progress), together, progress)
    if not known["rows"]:
        raise DataError(f"data.path={corpus.path!r} holds no row ({corpus.describe()}); give a path with rows")
    if not known["rows_with_target"]:
        raise DataError(
            f"data.path={corpus.path!r}: none of {known['rows']:,} rows has a token that is trained on "
            f"(data.train_on={encoder.train_on}); check the roles of its messages, and that the chat template's "
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
    say(f"{known['rows'] // together:,} rows, {known['tokens']:,} tokens, {known['trained']:,} of them trained on")
    (target / COMPLETE).write_text(json.dumps(known))


def _write_columns(
    target: Path, groups: Iterator[RowArrays], together: int, progress: TokenizeProgress
) -> dict[str, Any]:
    trained = with_target = 0
    tokens, masks, starts, hashes, first_targets = writers = [
        ColumnWriter(target / name, dtype) for name, dtype in FILES.items()
    ]
    with tokens, masks, starts, hashes, first_targets:
        for rows in groups:
            starts.extend(tokens.length + np.cumsum(rows.lengths) - rows.lengths)
            tokens.extend(rows.tokens)
            masks.extend(rows.trained)
            hashes.extend(rows.hashes)
            first_targets.extend(rows.first_targets)
            trained += int(rows.targets.sum())
            with_target += int(np.count_nonzero(rows.targets))
            progress.advance(starts.length // together, tokens.length)
    return {
        "rows": starts.length,
        "rows_with_target": with_target,
        "tokens": tokens.length,
        "trained": trained,
        "content": digest(*(writer.digest for writer in writers)),
    }
