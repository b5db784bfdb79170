"""The sources of a job, each prepared as a corpus of its own, as the data of one run.

One tokenizer is for all: the job's, or one that is trained on equally many characters of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from shardwise.data.corpus import Corpus, data_of_source, find_corpus
from shardwise.data.mixture import Mixture
from shardwise.data.packed_rows import PackedRows
from shardwise.data.packing import Windows
from shardwise.data.shared_manifest import SharedTokens, find_shared
from shardwise.data.shares import Assignment
from shardwise.data.store import digest
from shardwise.data.streaming.prepare import StreamCorpus, default_workers, find_stream
from shardwise.data.streaming.tokens import StreamedTokens
from shardwise.data.token_data import SourceFacts, TokenData
from shardwise.data.tokenizer import find_tokenizer
from shardwise.errors import ConfigError, DataError
from shardwise.job.data_section import ROW_FORMATS, DataSource
from shardwise.job.mixture import fault_of, is_weighted, weights_by_sample
from shardwise.job.schema import Job

Result = TypeVar("Result")
Found = Corpus | SharedTokens | StreamCorpus


@dataclass(frozen=True)
class _Prepared:
    name: str
    source: DataSource
    job: Job  # that would read it alone
    data: TokenData

    @property
    def split(self) -> Windows | PackedRows:
        assert isinstance(self.data.train, Windows | PackedRows)
        return self.data.train

    @property
    def held_out(self) -> Windows | PackedRows:
        assert isinstance(self.data.validation, Windows | PackedRows)
        return self.data.validation


def prepare_sources(
    job: Job, model_vocabulary: int | None, say: Callable[[str], None], read: Callable[[Job], TokenData]
) -> TokenData:
    """Return the data of a job's sources; `read` reads the data of a job with one corpus.

    Raises:
        ConfigError: the sources cannot be mixed.
        DataError: one of them is missing, or holds too little.
    """
    if fault := fault_of(job):
        raise ConfigError(f"data.sources: {fault.because}; {fault.fix}")
    ordered = sorted(job.data.sources, key=lambda source: source.label)
    corpora = [_within(source, partial(_found, job, source)) for source in ordered]
    _check_kinds(job, ordered, corpora)
    _check_vocabularies(ordered, corpora)
    tokenizer = _common_tokenizer(job, corpora, model_vocabulary, say)
    streams = sum(source.streaming for source in ordered)
    prepared = []
    for source, corpus in zip(ordered, corpora, strict=True):
        keys: dict[str, Any] = {"format": corpus.format}
        if isinstance(corpus, StreamCorpus):  # read as the job says, by its share of the processes
            keys = {"num_workers": job.data.num_workers or max(1, default_workers() // streams)}
        own = job.model_copy(update={"data": data_of_source(job.data, source).model_copy(update=tokenizer | keys)})
        prepared.append(_Prepared(source.label, source, own, _named(source, _within(source, partial(read, own)))))
    return _joined(job, prepared)


def _found(job: Job, source: DataSource) -> Found:
    data = data_of_source(job.data, source)
    return find_stream(data, source.label) if source.streaming else find_shared(data) or find_corpus(data)


def _named(source: DataSource, data: TokenData) -> TokenData:
    """Return the data of a source, whose stream, if it is one, knows its name for what it has to say."""
    if not isinstance(data.train, Windows) or not isinstance(data.train.stream, StreamedTokens):
        return data
    return replace(data, train=replace(data.train, stream=data.train.stream.named(source.label)))


def _within(source: DataSource, read: Callable[[], Result]) -> Result:
    """Return what `read` does; an error says of which source it is."""
    try:
        return read()
    except (DataError, ConfigError) as error:
        raise type(error)(f"data.sources, {source.label}: {error}") from error


def _check_kinds(job: Job, sources: Sequence[DataSource], corpora: Sequence[Found]) -> None:
    """Refuse sources that cannot stand in one batch.

    Raises:
        ConfigError: with the names of two of them.
    """
    kinds: dict[str, str] = {}
    for source, corpus in zip(sources, corpora, strict=True):
        form = corpus.format
        kind = form if form in (*ROW_FORMATS, "tokens") else "documents"
        kinds.setdefault("rows" if kind in ("chat", "prompt_completion") else kind, source.label)
    if len(kinds) == 1 or (_has_tokenizer(job) and kinds.keys() == {"documents", "tokens"}):
        return
    (first, one), (second, other), *_ = kinds.items()
    raise ConfigError(
        f"data.sources: {one} holds {first} and {other} holds {second}, which do not mix"
        + ("; set data.tokenizer to the one that made the tokens" if {first, second} == {"documents", "tokens"} else
           "; give sources of one kind")
    )  # fmt: skip


def _check_vocabularies(sources: Sequence[DataSource], corpora: Sequence[Found]) -> None:
    """Refuse directories of `shardwise data prepare` whose tokens are of two tokenizers.

    Raises:
        DataError: with the names of two of them.
    """
    labels = {
        corpus.vocabulary: source.label
        for source, corpus in zip(sources, corpora, strict=True)
        if isinstance(corpus, SharedTokens) and corpus.vocabulary is not None
    }
    if len(labels) > 1:
        one, other, *_ = labels.values()
        raise DataError(f"data.sources: {one} and {other} hold tokens of two tokenizers; prepare both with one")


def _has_tokenizer(job: Job) -> bool:
    return job.data.tokenizer is not None or job.model.path is not None


def _common_tokenizer(
    job: Job, corpora: Sequence[Found], model_vocabulary: int | None, say: Callable[[str], None]
) -> dict[str, str]:
    """Return the key that names the tokenizer trained on all sources; none where there is another, or no text."""
    texts = [corpus for corpus in corpora if not isinstance(corpus, SharedTokens)]
    if _has_tokenizer(job) or not texts or corpora[0].format == "tokens":
        return {}
    if len(texts) < len(corpora):
        raise ConfigError(
            "data.sources: some hold rows that are tokenized, and others rows that are not; set data.tokenizer to the "
            "one that made the tokens"
        )
    trained = find_tokenizer(job, texts, model_vocabulary, say)
    return {} if trained is None else {"tokenizer": str(trained.directory)}


def _joined(job: Job, prepared: Sequence[_Prepared]) -> TokenData:
    names = tuple(part.name for part in prepared)
    sizes = [len(part.split) for part in prepared]
    assignment = _assignment(job, names, sizes, [part.source.repeat for part in prepared])
    final = assignment
    if is_weighted(job.data):
        last = weights_by_sample(job.data)[-1][1]
        final = Assignment.of_weights([(0, [last[name] for name in names])])
    first = prepared[0].data
    train = Mixture(names, tuple(part.split for part in prepared), assignment, job.training.seed)
    held_out = Mixture(names, tuple(part.held_out for part in prepared), final, job.training.seed, is_held_out=True)
    return TokenData(
        train=train,
        validation=held_out,
        corpus=f"{len(prepared)} source{'s' * (len(prepared) > 1)}: {', '.join(names)}",
        documents=sum(part.data.documents for part in prepared),
        tokens=sum(part.data.tokens for part in prepared),
        vocabulary_size=max(part.data.vocabulary_size for part in prepared),
        split=first.split,
        tokenizer_directory=first.tokenizer_directory,
        eos_id=first.eos_id,
        content=digest(*((part.name, part.data.content) for part in prepared)),
        row_counts=first.row_counts,
        sets={part.name: part.held_out for part in prepared},
        sources=tuple(SourceFacts(part.name, part.job, part.data, _measures(job, part.source)) for part in prepared),
    )


def _assignment(job: Job, names: Sequence[str], sizes: Sequence[int], repeats: Sequence[float | None]) -> Assignment:
    if is_weighted(job.data):
        stages = weights_by_sample(job.data)
        return Assignment.of_weights([(start, [weights[name] for name in names]) for start, weights in stages])
    samples = [max(1, round(size * (repeat or 1))) for size, repeat in zip(sizes, repeats, strict=True)]
    return Assignment.of_epoch(samples)


def _measures(job: Job, source: DataSource) -> list[tuple[int, float]] | float:
    """Return a source's weight from each of some samples on, or its passes in an epoch."""
    if not is_weighted(job.data):
        return source.repeat or 1.0
    return [(start, weights[source.label]) for start, weights in weights_by_sample(job.data)]
