"""Sources of a job: their weights from each sample on, and why they cannot be mixed.

The legality table asks `fault_of` before anything is read, and the data do so again for who has no plan.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shardwise.job.data_section import ROW_FORMATS, STREAMED_FORMATS, CurriculumStage, DataSection, DataSource
from shardwise.job.schema import Job
from shardwise.words import listed, nearest

RAREST = 65_536_000  # one sample in so many is the smallest share
HUB_KEYS = ("dataset_config", "dataset_split", "dataset_revision")
NAME = re.compile(r"[A-Za-z0-9_.-]+")


class SourceFault(NamedTuple):
    """The reason why sources cannot be mixed, and what to do about it."""

    because: str
    fix: str


def is_weighted(data: DataSection) -> bool:
    """Return whether sources have weights, rather than passes."""
    return any(source.weight is not None for source in data.sources)


def weights_by_sample(data: DataSection) -> list[tuple[int, dict[str, float]]]:
    """Return the weight of every source from each of some samples on, the first of which is 0."""
    weights = {source.label: source.weight or 0.0 for source in data.sources}
    stages = [(0, weights)]
    for stage in data.curriculum:
        weights = weights | stage.weights
        stages.append((first_sample(stage, data.sequence_length), weights))
    return stages


def first_sample(stage: CurriculumStage, sequence_length: int) -> int:
    """Return the sample with which a stage of a curriculum begins."""
    return stage.samples if stage.samples is not None else -(-(stage.tokens or 0) // sequence_length)


def fault_of(job: Job) -> SourceFault | None:
    """Return what is wrong with the sources of a job, by its keys alone."""
    if not job.data.sources:
        return None
    return next(_faults(job), None)


def _faults(job: Job) -> Iterator[SourceFault]:
    yield from _name_faults(job)
    yield from _measure_faults(job.data)
    for source in job.data.sources:
        yield from _stream_faults(source) if source.streaming else _hub_faults(source)
    yield from _curriculum_faults(job.data)
    if is_weighted(job.data):
        yield from _weight_faults(job.data)
    if is_weighted(job.data) and job.training.epochs is not None:
        yield SourceFault(
            f"sources with a weight are read as often as needed, and training.epochs={job.training.epochs} has no end",
            "use training.steps, or repeat in the place of each weight",
        )
    if job.checkpoint.change_sources and not is_weighted(job.data):
        yield SourceFault(
            "checkpoint.change_sources goes on with other shares, and passes are counted from the start",
            "give every source a weight",
        )


def _name_faults(job: Job) -> Iterator[SourceFault]:
    names = [source.label for source in job.data.sources]
    for number, name in enumerate(names):
        if not NAME.fullmatch(name):
            yield SourceFault(
                f"source {number} has no name, and its path gives none of letters, digits, _, . and -",
                f"set data.sources[{number}].name",
            )
    for name, count in Counter(names).items():
        if count > 1:
            yield SourceFault(f"{count} sources have the name {name!r}", "give each a name of its own")
        if name in job.evaluation.sets:
            yield SourceFault(
                f"{name!r} is the name of a source and of a set in evaluation.sets, and both have a validation loss",
                "rename one of them",
            )


def _measure_faults(data: DataSection) -> Iterator[SourceFault]:
    with_weight = [source.label for source in data.sources if source.weight is not None]
    with_repeat = [source.label for source in data.sources if source.repeat is not None]
    if both := sorted({*with_weight} & {*with_repeat}):
        yield SourceFault(f"{listed(both)} has both weight and repeat", "keep one of them")
    for key, own in (("weight", with_weight), ("repeat", with_repeat)):
        others = [source.label for source in data.sources if source.label not in own]
        if own and others:
            yield SourceFault(
                f"{listed(own)} has a {key} and {listed(others)} has none", f"give every source a {key}, or none"
            )


def _stream_faults(source: DataSource) -> Iterator[SourceFault]:
    """Yield what is wrong with a source that is a stream."""
    if (source.path is None) == (source.dataset is None):
        yield SourceFault(
            f"{source.label or 'a source'} is a stream, which is read from one place",
            "give it a path, or a dataset for a name on the Hub, one of them",
        )
    if source.weight is None:
        yield SourceFault(
            f"{source.label} is a stream, and nobody has counted its samples", "give every source a weight"
        )
    if source.format in ROW_FORMATS:
        yield SourceFault(
            f"rows of conversations and pairs are packed whole, for which all of their lengths have to be known, and "
            f"{source.label} is a stream",
            "leave its streaming out: they are tokenized once",
        )
    elif source.format not in STREAMED_FORMATS:
        yield SourceFault(
            f"{source.label} is a stream, which is read row by row from shards, and has format {source.format}",
            "write its documents as JSON lines or Parquet, or leave its streaming out",
        )
    if source.filter:
        yield SourceFault(
            f"{source.label} is a stream, which reads each of its rows, and has a filter",
            "filter its shards before, or leave its streaming out",
        )
    for key in _set_of(source, HUB_KEYS) if source.dataset is None else ():
        yield SourceFault(f"{key} of {source.label} is of a dataset, and it has a path", f"leave {key} out")


def _hub_faults(source: DataSource) -> Iterator[SourceFault]:
    """Yield what is wrong with a source that is tokenized whole and has keys of the Hub."""
    for key in _set_of(source, ("dataset", *HUB_KEYS)):
        yield SourceFault(
            f"{key} of {source.label or 'a source'} is of a data set on the Hub, which is read as a stream",
            "set its streaming, or download it and set its path",
        )


def _set_of(source: DataSource, keys: Sequence[str]) -> list[str]:
    """Return those of the keys that a source has other than as they are by default."""
    return [key for key in keys if getattr(source, key) != DataSource.model_fields[key].default]


def _curriculum_faults(data: DataSection) -> Iterator[SourceFault]:
    names, before = [source.label for source in data.sources], 0
    if data.curriculum and not is_weighted(data):
        yield SourceFault("data.curriculum changes weights, and the sources have none", "give every source a weight")
    for number, stage in enumerate(data.curriculum):
        where = f"data.curriculum[{number}]"
        if (stage.samples is None) == (stage.tokens is None):
            yield SourceFault(f"{where} begins at a sample, or at a token", "give it one of samples and tokens")
        if not stage.weights:
            yield SourceFault(f"{where} changes no weight", "give its weights, or leave it out")
        for name in stage.weights:
            if name not in names:
                yield SourceFault(f"{where}.weights has {name!r}, which no source is.{nearest(name, names)}", "mend it")
        start = first_sample(stage, data.sequence_length)
        if start <= before:
            yield SourceFault(f"{where} begins with sample {start}, not behind {before}", "put them in order")
        before = start


def _weight_faults(data: DataSection) -> Iterator[SourceFault]:
    stages = weights_by_sample(data)
    for start, weights in stages:
        total = sum(weights.values())
        if not total:
            yield SourceFault(f"the weights from sample {start} on are all 0", "give one of them more")
        for name, weight in weights.items():
            if 0 < weight < total / RAREST:
                yield SourceFault(
                    f"the weight of {name!r}, {weight:g} of {total:g}, is below one sample in {RAREST:,}",
                    "give it more, or leave it out",
                )
    for name in stages[0][1]:
        if not any(weights[name] for _, weights in stages):
            yield SourceFault(f"the weight of {name!r} is 0 throughout", "give it more, or leave it out")
