"""From a job's data section to sequences of tokens: find the corpus, its tokenizer, tokenize once, open from the cache.

`prepare` may be called by every process. On each host the first one builds the cache, under a lock; the others wait
and open the same memory-mapped files, so nodes need not share a file system. `TokenData` pickles as paths and numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.cache import cache_root
from shardwise.data.corpus import Corpus, data_format, find_corpus
from shardwise.data.evaluation_sets import open_sets
from shardwise.data.factory import open_samples
from shardwise.data.file_samples import open_file_samples
from shardwise.data.packing import ENDLESS, Masking, Spans, Windows, split_windows
from shardwise.data.parallel_tokenize import parts_removed_if_refused, remove_parts
from shardwise.data.row_cache import open_rows, prepare_rows
from shardwise.data.shared_manifest import SharedTokens, find_shared
from shardwise.data.shared_rows import check_rendering
from shardwise.data.shared_tokens import check_shared, tokenizer_of
from shardwise.data.sources import prepare_sources
from shardwise.data.split import TokenCorpus, document_hash, split_rule
from shardwise.data.store import COMPLETE, Column, ColumnWriter, build_once, digest
from shardwise.data.streaming.prepare import PreparedStream, find_stream
from shardwise.data.token_data import TokenData
from shardwise.data.tokenize_progress import TokenizeProgress
from shardwise.data.tokenized_text import tokenized_pieces
from shardwise.data.tokenizer import (
    TokenizerFacts,
    TokenizerSource,
    check_vocabulary,
    facts_of,
    find_tokenizer,
    load_tokenizer,
)
from shardwise.errors import ConfigError, DataError
from shardwise.job.data_section import ROW_FORMATS
from shardwise.job.schema import Job
from shardwise.job.tasks import TASKS

Say = Callable[[str], None]

VERSION = 4  # of the cached layout and of what is refused when it is built; part of the cache key
TOKENS, DOCUMENTS, HASHES = "tokens.arrow", "documents.arrow", "hashes.arrow"


def prepare(job: Job, model_vocabulary: int | None = None, say: Say = lambda text: None) -> TokenData:
    """The data of `job`, tokenized now unless the cache has it; `say` hears of the progress."""

    def read(other: Job) -> TokenData:
        return _prepare(other, model_vocabulary, say)

    data = prepare_sources(job, model_vocabulary, say, read) if job.data.sources else read(job)
    return open_sets(job, data, read) if job.evaluation.sets else data


def _prepare(job: Job, model_vocabulary: int | None, say: Say) -> TokenData:
    if data_format(job.data) == "factory":
        return _from_factory(job, model_vocabulary)
    if TASKS[job.model.task].reads_files:
        return open_file_samples(job, model_vocabulary)
    if job.data.streaming:
        return _from_stream(job, model_vocabulary, say)
    shared = find_shared(job.data)
    if shared is not None:
        return _from_shared(shared, job, model_vocabulary, say)
    corpus = find_corpus(job.data)
    source = find_tokenizer(job, [corpus], model_vocabulary, say)
    if corpus.format in ROW_FORMATS:
        assert source is not None  # only a corpus of token ids has none
        return prepare_rows(job, corpus, source, model_vocabulary, say)
    key = digest(VERSION, corpus.identity, source.identity if source else None)
    directory = cache_root(job.data.cache_directory) / "tokens" / key
    if (directory / COMPLETE).is_file():
        say(f"tokens of {corpus.describe()} are cached in {directory}")
    parts = directory.with_name(f"{key}.parts")
    build_once(directory, lambda target: _build(target, parts, corpus, source, model_vocabulary, say), say)
    remove_parts(parts)
    return open_tokens(directory, job, model_vocabulary, source)


def _from_shared(shared: SharedTokens, job: Job, model_vocabulary: int | None, say: Say) -> TokenData:
    check_shared(shared, job, say)
    source = tokenizer_of(shared)
    if shared.rows is None:
        return open_tokens(shared.directory, job, model_vocabulary, source)
    check_rendering(shared, job)
    assert source is not None  # rows are never written without
    return open_rows(shared.directory, job, source, model_vocabulary)


def open_tokens(
    directory: Path, job: Job, model_vocabulary: int | None = None, source: TokenizerSource | None = None
) -> TokenData:
    """Token data from a complete cached directory; reads no corpus."""
    try:
        known = json.loads((directory / COMPLETE).read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"cached data {directory} cannot be read ({error}); delete it") from error
    tokenizer = TokenizerFacts(**known["tokenizer"]) if known["tokenizer"] else None
    if tokenizer is not None:
        check_vocabulary(tokenizer.vocabulary_size, model_vocabulary, source.directory if source else directory)
    limit = tokenizer.vocabulary_size if tokenizer is not None else model_vocabulary
    if limit is not None and known["largest_token"] >= limit:
        raise DataError(
            f"{known['corpus']}: input_ids hold {known['largest_token']}, the vocabulary has {limit} tokens "
            f"(0 … {limit - 1}); use a model with a larger vocabulary"
        )
    corpus, rule = (
        TokenCorpus(*(Column(directory / name) for name in (TOKENS, DOCUMENTS, HASHES))),
        split_rule(job.data),
    )
    train, validation = split_windows(
        corpus,
        rule,
        job.data.sequence_length,
        job.data.validation_fraction,
        job.training.seed,
        masking=_masking(job, tokenizer),
        spans=_spans(job, tokenizer),
        isolate_documents=job.data.isolate_documents,
    )
    return TokenData(
        train=train,
        validation=validation,
        corpus=known["corpus"],
        documents=len(corpus.documents),
        tokens=len(corpus.tokens),
        vocabulary_size=limit if limit is not None else known["largest_token"] + 1,
        split=rule,
        tokenizer_directory=str(source.directory) if source else None,
        eos_id=tokenizer.eos_id if tokenizer else None,
        content=known["content"],
        directory=str(directory),
    )


def _from_factory(job: Job, model_vocabulary: int | None) -> TokenData:
    if job.data.isolate_documents:
        raise ConfigError("data.isolate_documents has no meaning with data.factory: its samples are not packed")
    if split_rule(job.data) == "documents":
        raise ConfigError(
            "data.validation_split=documents has no meaning with data.factory: its rows stay where they are, and the "
            "last ones are held out; use place, or leave it out"
        )
    train, validation = open_samples(job.data)
    return TokenData(
        train=train,
        validation=validation,
        corpus=train.name,
        documents=len(train) + len(validation),
        tokens=0,
        vocabulary_size=model_vocabulary or 0,
        split=split_rule(job.data),
        tokenizer_directory=job.data.tokenizer,
    )


def _from_stream(job: Job, model_vocabulary: int | None, say: Say) -> TokenData:
    """Return the windows of a stream that is read as they are trained on, with a validation set that is made now."""
    corpus = find_stream(job.data)
    source = find_tokenizer(job, [corpus], model_vocabulary, say)
    stream = PreparedStream(corpus, source, model_vocabulary, job.training.seed)
    options: dict[str, Any] = {
        "masking": _masking(job, stream.facts),
        "spans": _spans(job, stream.facts),
        "isolate_documents": job.data.isolate_documents,
    }
    train = Windows(stream.training_tokens(), ENDLESS, job.data.sequence_length, **options)
    validation, known = stream.validation(say, train.extra)
    return TokenData(
        train=train,
        validation=replace(validation, **options),
        corpus=corpus.describe(),
        documents=0,
        tokens=0,
        vocabulary_size=stream.limit or known["largest_token"] + 1,
        split=split_rule(job.data),
        tokenizer_directory=str(source.directory) if source else None,
        eos_id=stream.facts.eos_id if stream.facts else None,
        content=stream.content,
        directory=known["directory"],
    )


def _masking(job: Job, tokenizer: TokenizerFacts | None) -> Masking | None:
    if job.model.task != "masked_lm":
        return None
    if tokenizer is None or tokenizer.mask_id is None:
        have = "data.format=tokens without data.tokenizer" if tokenizer is None else "this tokenizer"
        raise DataError(
            f"model.task=masked_lm needs a mask token, {have} has none; set data.tokenizer to one that does"
        )
    return Masking(job.data.mask_probability, tokenizer.mask_id, tokenizer.vocabulary_size, tokenizer.special_ids)


def _spans(job: Job, tokenizer: TokenizerFacts | None) -> Spans | None:
    if job.model.task != "seq2seq_lm":
        return None
    spans = Spans(
        job.data.mask_probability,
        job.data.mean_span_length,
        tokenizer.sentinel_ids if tokenizer else (),
        tokenizer.eos_id if tokenizer else None,
    )
    needed = spans.counts(job.data.sequence_length)[1]
    if len(spans.sentinel_ids) < needed:
        have = "data.format=tokens without data.tokenizer" if tokenizer is None else "this tokenizer"
        raise DataError(
            f"model.task=seq2seq_lm leaves {needed} spans out of data.sequence_length={job.data.sequence_length} "
            f"tokens and needs a token <extra_id_…> for each, {have} has {len(spans.sentinel_ids)}; set data.tokenizer "
            "to one that has them, use a shorter sequence_length, or a larger data.mean_span_length"
        )
    return spans


def _build(
    target: Path, parts: Path, corpus: Corpus, source: TokenizerSource | None, model_vocabulary: int | None, say: Say
) -> None:
    """Write tokens, document starts and their description into `target`; `parts` stays where this is cut off."""
    tokenizer = load_tokenizer(source) if source else None
    facts = facts_of(tokenizer) if tokenizer else None
    if facts and source:
        check_vocabulary(facts.vocabulary_size, model_vocabulary, source.directory)
    limit = facts.vocabulary_size if facts else model_vocabulary
    say(f"tokenizing {corpus.describe()}")
    documents: Iterator[tuple[np.ndarray, bool]]
    with TokenizeProgress(corpus.size, "documents", say) as progress, parts_removed_if_refused(parts):
        if corpus.format == "tokens":
            documents = ((ids, True) for ids in corpus.token_rows(limit))
        else:
            assert tokenizer is not None  # find_tokenizer trains one for text
            assert source is not None
            documents = tokenized_pieces(corpus, tokenizer, source, parts, progress)
        known: dict[str, Any] = {"corpus": corpus.describe(), "tokenizer": asdict(facts) if facts else None}
        known |= _write_columns(target, documents, facts.eos_id if facts else None, progress)
    if not known["tokens"]:
        raise DataError(corpus.emptiness("token"))
    say(f"{known['documents']:,} documents, {known['tokens']:,} tokens")
    (target / COMPLETE).write_text(json.dumps(known))


def _write_columns(
    target: Path, documents: Iterator[tuple[np.ndarray, bool]], end: int | None, progress: TokenizeProgress
) -> dict[str, Any]:
    """Write the token ids of all documents, where each starts and what it hashes to; return what sums them up."""
    largest, at_start, content = -1, True, document_hash()
    with (
        ColumnWriter(target / TOKENS, np.int32) as tokens,
        ColumnWriter(target / DOCUMENTS, np.int64) as starts,
        ColumnWriter(target / HASHES, np.uint64) as hashes,
    ):
        for ids, last in _ended(_reported(documents, starts, tokens, progress), end):
            if at_start:
                starts.extend([tokens.length])
            tokens.extend(ids)
            content.update(ids.astype("<i4").tobytes())
            largest, at_start = max(largest, int(ids.max())), last
            if last:
                hashes.extend([content.intdigest()])
                content.reset()
    return {
        "tokens": tokens.length,
        "documents": starts.length,
        "largest_token": largest,
        "content": digest(tokens.digest, starts.digest),
    }


def _ended(documents: Iterator[tuple[np.ndarray, bool]], end: int | None) -> Iterator[tuple[np.ndarray, bool]]:
    """The pieces that hold tokens, with whether they are their document's last.

    A document that does not end with the token `end` gets it. One without any token is left out.
    """
    waiting: np.ndarray | None = None  # it is its document's last piece if those that follow hold no token
    for ids, last in documents:
        if len(ids):
            if waiting is not None:
                yield waiting, False
            waiting = ids
        if last and waiting is not None:
            if end is not None and waiting[-1] != end:
                waiting = np.append(waiting, end)
            yield waiting, True
            waiting = None


def _reported(
    documents: Iterator[tuple[np.ndarray, bool]],
    starts: ColumnWriter,
    tokens: ColumnWriter,
    progress: TokenizeProgress,
) -> Iterator[tuple[np.ndarray, bool]]:
    """The same pieces; `progress` hears how much has been written."""
    for piece in documents:
        yield piece
        progress.advance(starts.length, tokens.length)
