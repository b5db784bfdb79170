"""Rows of one shard from a given row on, each with its number and a checked value: text, or token ids.

A shard is a local file here; `name` is what messages call it. What cannot be read raises DataError with shard and row.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from shardwise.data.compressed import UTF_8, opened_text
from shardwise.data.readers import BATCH_ROWS, BESIDE_TOKENS, Columns, check_text, json_row, refuse_twins, token_ids
from shardwise.errors import DataError
from shardwise.words import nearest

TEXT = ("txt", "text")  # extensions of members of a tar that are a text themselves

Value = str | np.ndarray
Numbered = tuple[int, Columns]  # number of a row in its shard, from 0, and its columns


class RowReader(NamedTuple):
    """Settings by which the rows of a shard are read.

    Attributes:
        container: how a shard is read.
        column: that holds the text or the token ids.
        holds_tokens: whether it holds token ids.
        limit: token ids are below it, where that is known.
    """

    container: str
    column: str
    holds_tokens: bool
    limit: int | None

    def values(self, path: Path, name: str, start: int) -> Iterator[tuple[int, Value]]:
        """Yield (number, value) of the rows from `start` on.

        Raises:
            DataError: the shard is damaged, or a row is not what it should be.
        """
        number = start
        try:
            for number, columns in CONTAINERS[self.container](path, start, self.column):
                yield number, self._value(f"{name}, row {number}", columns)
                number += 1
        except DataError as error:
            raise DataError(str(error).replace(str(path), name)) from error
        except (OSError, EOFError, ValueError, tarfile.TarError) as error:  # pyarrow's errors are among these
            raise DataError(f"{name}, row {number}: the shard cannot be read: {error}; write it again") from error

    def _value(self, where: str, columns: Columns) -> Value:
        if self.column not in columns:
            raise DataError(f"{where}: no column {self.column!r} (data.field).{nearest(self.column, list(columns))}")
        value = columns[self.column]
        if self.holds_tokens:
            return token_ids(where, value, columns, self.limit)
        check_text(where, value)
        return str(value)


def streamed_jsonl(path: Path, start: int, column: str) -> Iterator[Numbered]:
    """Lines of JSON; a row is a line, blank ones are passed over."""
    number = -1
    try:
        with opened_text(path) as stream:
            for number, line in enumerate(stream):
                if number >= start and line.strip():
                    yield number, json_row(line, f"{path}, row {number}")
    except DataError as error:
        message = str(error)
        if ", row " in message:
            raise
        raise DataError(message.replace(str(path), f"{path}, row {number + 1}", 1)) from error


def streamed_parquet(path: Path, start: int, column: str) -> Iterator[Numbered]:
    """Rows of a Parquet file; row groups before `start` are not read."""
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as file:
        present = file.schema_arrow.names
        wanted = [name for name in (column, *BESIDE_TOKENS) if name in present]
        if column not in present:
            raise DataError(f"{path}: no column {column!r} (data.field).{nearest(column, present)}")
        refuse_twins(str(path), wanted, present)
        number = 0
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if number + rows <= start:
                number += rows
                continue
            for batch in file.iter_batches(batch_size=BATCH_ROWS, row_groups=[group], columns=wanted):
                for row in batch.to_pylist():
                    if number >= start:
                        yield number, row
                    number += 1


def streamed_dataset(path: Path, start: int, column: str) -> Iterator[Numbered]:
    """Rows of an Arrow file of `datasets.save_to_disk`; record batches before `start` are not decoded."""
    import pyarrow as pa

    with pa.memory_map(str(path)) as source:
        reader = pa.ipc.open_stream(source)
        present = reader.schema.names
        if column not in present:
            raise DataError(f"{path}: no column {column!r} (data.field).{nearest(column, present)}")
        wanted = [name for name in (column, *BESIDE_TOKENS) if name in present]
        first = 0  # row of the batch
        for batch in reader:
            passed = max(start - first, 0)
            if passed < len(batch):
                yield from enumerate(batch.select(wanted).slice(passed).to_pylist(), start=first + passed)
            first += len(batch)


class WholeArchiveMember(tarfile.TarInfo):
    """A member of a tar in which a damaged header, or none before the end, is no end but an error."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> Self:
        """Return the member that follows.

        Raises:
            ReadError: its header is damaged, or the archive is cut off before its end.
        """
        try:
            return super().fromtarfile(archive)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]  # of the block of zeros that ends an archive
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"the archive is damaged or cut off here ({error})") from error


def webdataset_rows(path: Path, start: int, column: str) -> Iterator[Numbered]:
    """Samples of a WebDataset tar: neighbouring members with one key; their extensions are the columns.

    A member `.json` is a dict of columns, `.txt` is text and is the column `text` as well.
    """
    number, key, sample = -1, None, dict[str, Any]()
    with tarfile.open(path, "r|*", tarinfo=WholeArchiveMember) as archive:
        for member in archive:
            if not member.isfile():
                continue
            folder, _, base = member.name.rpartition("/")
            stem, _, extension = base.partition(".")
            if (folder, stem) != key:
                if number >= start:
                    yield number, sample
                number, key, sample = number + 1, (folder, stem), {}
            if number >= start:
                sample |= _member(archive, member, extension, f"{path}, row {number}")
    if key is not None and number >= start:
        yield number, sample


def _member(archive: tarfile.TarFile, member: tarfile.TarInfo, extension: str, where: str) -> dict[str, Any]:
    """Return the columns that a member of a tar holds."""
    if extension not in ("json", *TEXT):
        return {}
    content = archive.extractfile(member)
    assert content is not None  # a file
    try:
        text = content.read().decode(UTF_8)
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: {member.name} is not valid UTF-8 ({error.reason}); write it again") from error
    return json_row(text, where) if extension == "json" else {extension: text, "text": text}


CONTAINERS: dict[str, Callable[[Path, int, str], Iterator[Numbered]]] = {
    "jsonl": streamed_jsonl,
    "parquet": streamed_parquet,
    "dataset": streamed_dataset,
    "webdataset": webdataset_rows,
}
