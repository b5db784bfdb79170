"""Named sets that are evaluated beside the validation split: whole files, read as a job's own data are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from shardwise.data.corpus import data_format, data_of_source
from shardwise.data.mixture import Mixture
from shardwise.data.packed_rows import PackedRows
from shardwise.data.packing import Windows
from shardwise.data.shared_manifest import find_shared
from shardwise.data.split import TokenStream
from shardwise.data.store import digest
from shardwise.data.token_data import TokenData
from shardwise.errors import ConfigError, DataError
from shardwise.job.data_section import ROW_FORMATS
from shardwise.job.schema import Job


def job_of_set(job: Job, path: str, own: TokenData) -> Job:
    """Return the job that reads a set: with the tokenizer and the format of the data that are trained on."""
    of_one = data_of_source(job.data, job.data.sources[0]) if job.data.sources else job.data
    name = data_format(of_one)
    is_found = name in ROW_FORMATS or (name == "tokens" and find_shared(of_one) is None)
    keys: dict[str, Any] = {"path": path, "max_documents": None, "format": name if is_found else "auto"}
    keys |= {"filter": None, "streaming": False, "dataset": None}
    if job.data.tokenizer is None and job.model.path is None and own.tokenizer_directory is not None:
        keys["tokenizer"] = own.tokenizer_directory  # it was trained on the job's own data
    return job.model_copy(update={"data": of_one.model_copy(update=keys)})


def open_sets(job: Job, own: TokenData, read: Callable[[Job], TokenData]) -> TokenData:
    """Return the job's data with its sets; `read` reads the data of a job.

    Raises:
        ConfigError: keys of the job are none of a set's format.
        DataError: a set is missing, holds too little, or something else than the data that are trained on.
    """
    sets = {}
    for name, path in job.evaluation.sets.items():
        try:
            data = read(job_of_set(job, path, own))
        except (DataError, ConfigError) as error:
            raise type(error)(f"evaluation.sets.{name}: {error}") from error
        if type(data.train) is not type(own.train.splits[0] if isinstance(own.train, Mixture) else own.train):
            raise DataError(
                f"evaluation.sets.{name}={path!r} holds {data.corpus}, and the data that are trained on are "
                f"{own.corpus}; give a set of the same format"
            )
        sets[name] = data
    content = digest(*(data.content for data in sets.values()))
    named = {name: whole(data) for name, data in sets.items()}
    return replace(own, sets={**own.sets, **named}, content_of_sets=content)


def whole(data: TokenData) -> Windows | PackedRows:
    """Return the sequences of all tokens, or of all rows in the order of the file, that training could use."""
    train, validation = data.train, data.validation
    if isinstance(train, PackedRows) and isinstance(validation, PackedRows):
        return replace(train, rows=np.sort(np.concatenate([train.rows, validation.rows])))
    assert isinstance(train, Windows) and isinstance(train.stream, TokenStream)
    corpus = train.stream.corpus
    count = (len(corpus.tokens) - train.extra) // train.sequence_length
    return replace(train, stream=TokenStream(corpus, np.array([[0, len(corpus.tokens)]])), count=count, mixed_by=None)
