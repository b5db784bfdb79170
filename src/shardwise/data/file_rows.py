"""Rows that name files of images or of sound: which are for training and which for validation, and where files are.

Exact definition of the split. Of R rows v = max(1, floor(R * validation_fraction)) are for validation. Rows are ranked
by `data/split.py`'s draw, where h is the XXH3-64 of a row's columns as JSON with sorted keys and times, decimals and
bytes as Python's text; equal draws by place. For validation are the first v of the ranking, or with `validation_split:
place` the last v rows, which then keep their order. Both splits have their rows in the order of the ranking.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import date, time, timedelta
from decimal import Decimal
from itertools import islice
from math import floor
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import numpy as np
import xxhash

from shardwise.data.corpus import find_corpus
from shardwise.data.generated import is_function
from shardwise.data.readers import short
from shardwise.data.split import ranking, split_rule
from shardwise.errors import DataError
from shardwise.job.schema import Job

AS_TEXT = (bytes, date, time, timedelta, Decimal, UUID, np.generic)


class FileRow(NamedTuple):
    """A row.

    Attributes:
        where: its file and number, for messages.
        folder: from which paths in it are read; of rows that a function makes the working directory.
        columns: those that were asked for, where the row has them.
    """

    where: str
    folder: Path
    columns: Mapping[str, Any]

    def file(self, value: object, column: str) -> Path:
        """Return the existing file that a value names.

        Raises:
            DataError: it names none.
        """
        if isinstance(value, Mapping) and not value.get("bytes"):  # as `datasets` writes a file that it has not read
            value = value.get("path")
        if not isinstance(value, str) or not value:
            raise DataError(
                f"{self.where}: {column} holds {short(value)}; give the path of a file, from the directory of the rows"
            )
        try:
            path = self.folder / Path(value).expanduser()
            is_file = path.is_file()
        except (OSError, RuntimeError) as error:  # longer than a path is, as an image in base64, or of no user
            why = str(getattr(error, "strerror", None) or error)
            raise DataError(
                f"{self.where}: {column}={short(value)} is no path ({why}); give that of a file, or remove the row"
            ) from error
        if not is_file:
            raise DataError(f"{self.where}: {column}={value!r} is no file ({path}); mend the path, or remove the row")
        return path


class FileDataset(NamedTuple):
    """Maker of a map-style data set of some rows.

    Attributes:
        make: it.
        tokenizer: directory of the tokenizer, if the rows have text.
        stacked: tensors that have one shape in all rows; those of others stand one behind the other in a batch. None:
            all have.
    """

    make: Callable[[Sequence[FileRow]], Any]
    tokenizer: str | None = None
    stacked: frozenset[str] | None = None


def read_rows(job: Job, required: Sequence[str], optional: Sequence[str] = ()) -> list[FileRow]:
    """Return all rows of the job's JSON lines, Parquet files or saved data set, in their order.

    Raises:
        DataError: a row lacks a required column.
    """
    corpus, rows = find_corpus(job.data), []
    for path in corpus.files:
        folder = Path.cwd() if is_function(str(job.data.path)) else path if path.is_dir() else path.parent
        for where, columns in replace(corpus, files=(path,), max_documents=None).rows((*required, *optional)):
            missing = next((name for name in required if columns.get(name) is None), None)
            if missing is not None:
                raise DataError(f"{where}: no column {missing!r}, which model.task={job.model.task} reads; add it")
            rows.append(FileRow(where, folder, columns))
    return list(islice(rows, job.data.max_documents))


def row_hashes(rows: Sequence[FileRow]) -> np.ndarray:
    """Return the hash of each row [R] as defined above.

    Raises:
        DataError: a column holds an object that has no text, such as an image that was read.
    """
    return np.array([xxhash.xxh3_64_intdigest(_as_json(row).encode()) for row in rows], dtype=np.uint64)


def _as_json(row: FileRow) -> str:
    try:
        return json.dumps(row.columns, sort_keys=True, default=_as_text)
    except TypeError as error:
        raise DataError(
            f"{row.where}: {error}, and rows are held out by the JSON of their columns; leave that column out of the "
            "rows, or give data.filter conditions in the place of a function, which reads all columns"
        ) from error


def _as_text(value: object) -> str:
    """Return what Parquet has and JSON has not; other objects may have another text in each process."""
    if not isinstance(value, AS_TEXT):
        raise TypeError(f"a column holds {type(value).__name__}")
    return str(value)


def split_file_rows(job: Job, rows: Sequence[FileRow], hashes: np.ndarray) -> tuple[list[FileRow], list[FileRow]]:
    """Return (training, validation) rows as defined above, by their hashes [R].

    Raises:
        DataError: there are fewer than two.
    """
    if len(rows) < 2:
        raise DataError(
            f"data.path={job.data.path!r} holds {len(rows)} rows; give two at least, one for training and one for "
            "validation"
        )
    held_out = max(1, floor(len(rows) * job.data.validation_fraction))
    if split_rule(job.data) == "place":
        first = len(rows) - held_out
        order = [*_ranked(job, hashes[:first]), *range(first, len(rows))]
        return [rows[number] for number in order[:first]], [rows[number] for number in order[first:]]
    ranked = _ranked(job, hashes)
    return [rows[number] for number in ranked[held_out:]], [rows[number] for number in ranked[:held_out]]


def _ranked(job: Job, hashes: np.ndarray) -> list[int]:
    return [int(number) for number in ranking(hashes, job.training.seed)]
