"""Rows of one file: text from text files, JSON lines, CSV, Parquet and saved data sets, or the `input_ids` of a row.

Each reader is a generator of documents or rows, in file order; a bad row raises DataError with file and row. Used by
`shardwise.data.corpus`.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from shardwise.data.compressed import content_suffix, opened_text, tell_read
from shardwise.data.row_filter import EVERY_COLUMN
from shardwise.errors import DataError
from shardwise.words import nearest

PIECE = 1 << 20  # characters of a document that are tokenized at once
BATCH_ROWS = 1024

# Columns beside `input_ids` that say which tokens are learned. Packed sequences know none of that.
LABELS = "labels"
MASKS = ("attention_mask", "loss_mask", "completion_mask", "assistant_masks")
BESIDE_TOKENS = (LABELS, *MASKS)

csv.field_size_limit((1 << 31) - 1)  # a cell may be a document; Python's limit is 131,072 characters

Columns = Mapping[str, Any]  # of a row: those that its reader was asked for, where the row has them
Row = tuple[str, Columns]  # where it stands (for messages), and its columns


def pieces(stream: TextIO) -> Iterator[tuple[str, bool]]:
    """(text, is the document's last piece): about PIECE characters each, cut after a line break.

    A long document is never held or tokenized whole. A document without text gives nothing.
    """
    current = stream.read(PIECE) + stream.readline()
    while current:
        following = stream.read(PIECE) + stream.readline()
        yield current, not following
        current = following


def text_file(path: Path) -> Iterator[tuple[str, bool]]:
    """Pieces of one text file, which is one document."""
    with opened_text(path, newline="") as stream:
        yield from pieces(stream)


def text_pieces(where: str, value: Any) -> Iterator[tuple[str, bool]]:
    """Pieces of a row's text."""
    check_text(where, value)
    yield from pieces(io.StringIO(value, newline=""))


def check_text(where: str, value: Any) -> None:
    """Refuse what no tokenizer can encode.

    Raises:
        DataError: it is not text, or holds half a character.
    """
    if not isinstance(value, str):
        raise DataError(
            f"{where}: expected text, found {type(value).__name__} {short(value)}; write it as text, or remove the row"
        )
    _refuse_surrogates(where, value)


def _refuse_surrogates(where: str, text: str) -> None:
    """Refuse half of a pair of UTF-16, which JSON can write as an escape and no tokenizer can encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: the text holds a lone surrogate, U+{ord(text[error.start]):04X} at character {error.start + 1}, "
            "which is half a character; write the text again with both halves, or without it"
        ) from error


def token_ids(where: str, value: Any, columns: Columns, limit: int | None) -> np.ndarray:
    """A row's `input_ids`; each must be an integer of 0 … limit - 1, and all are learned.

    Raises:
        DataError: they are no such integers, or a column beside them says that some are not learned.
    """
    try:
        array = np.asarray(value if value is not None else [None])
    except ValueError:
        array = np.asarray([None])
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise DataError(
            f"{where}: input_ids must be a list of integers, found {short(value)}; write one, or remove the row"
        )
    _refuse_unread(where, array, columns)
    if array.size and array.min() < 0:
        raise DataError(
            f"{where}: input_ids holds {array.min()}, and token ids are not negative; write the tokenizer's, or remove "
            "the row"
        )
    if array.size and limit is not None and array.max() >= limit:
        raise DataError(
            f"{where}: input_ids holds {array.max()}, the vocabulary has {limit} tokens (0 … {limit - 1}); "
            "use the tokenizer that the model was made for, or a model with a larger vocabulary"
        )
    return array.astype(np.int64)


def _refuse_unread(where: str, ids: np.ndarray, columns: Columns) -> None:
    """Refuse labels other than the token ids themselves, such as a class, and masks that leave some of them out."""
    labels = columns.get(LABELS)
    if labels is not None and not np.array_equal(labels, ids):
        raise _unread(where, LABELS, "differs from input_ids")
    for name in MASKS:
        mask = columns.get(name)
        if mask is not None and not isinstance(mask, list):
            raise _unread(where, name, f"holds {short(mask)} and no list")
        if mask is not None and not all(mask):
            raise _unread(where, name, "leaves tokens out")


def _unread(where: str, column: str, what: str) -> DataError:
    return DataError(
        f"{where}: the column {column} {what}, and data.format=tokens learns every token of input_ids; leave the "
        "column out, or give whole samples with a data.factory"
    )


def jsonl_rows(path: Path, required: Sequence[str], optional: Sequence[str] = ()) -> Iterator[Row]:
    """One JSON object a line; blank lines are skipped."""
    with opened_text(path) as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                where = f"{path}, line {number}"
                row = json_row(line, where)
                wanted = _columns(where, list(row), required, optional)
                yield where, {name: row[name] for name in wanted}


def json_row(line: str, where: str) -> dict[str, Any]:
    """Return the object that a line holds.

    Raises:
        DataError: it is not JSON, or no object.
    """
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where}: not valid JSON ({error.msg} at column {error.colno}); write one object a line, or remove the "
            "line"
        ) from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or as many levels
        raise DataError(f"{where}: JSON that cannot be read ({error}); write it simpler, or remove the line") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected a JSON object, found {short(row)}; write one a line, or remove the line")
    return row


def csv_rows(path: Path, required: Sequence[str], optional: Sequence[str] = ()) -> Iterator[Row]:
    """Rows of a CSV file below its line of column names, as RFC 4180 has them; of a .tsv file by tabs. All are text."""
    with opened_text(path, newline="") as stream:
        lines = csv.reader(stream, delimiter="\t" if content_suffix(path) == ".tsv" else ",", strict=True)
        try:
            names = next(lines, [])
            wanted = _columns(str(path), names, required, optional)
            for cells in lines:
                where = f"{path}, line {lines.line_num}"
                if cells:  # of a blank line there are none
                    _check_cells(where, cells, names)
                    row = dict(zip(names, cells, strict=True))
                    yield where, {name: row[name] for name in wanted}
        except csv.Error as error:
            raise DataError(
                f"{path}, line {lines.line_num}: not valid CSV ({error}); quote cells with quotes or line breaks in "
                "them, or set data.format to what it is"
            ) from error


def _check_cells(where: str, cells: Sequence[str], names: Sequence[str]) -> None:
    if len(cells) != len(names):
        raise DataError(
            f"{where}: {len(cells)} cells, and the first line names {len(names)} columns; quote cells with commas in "
            "them, or remove the line"
        )


def parquet_rows(path: Path, required: Sequence[str], optional: Sequence[str] = ()) -> Iterator[Row]:
    """Rows of a Parquet file."""
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            wanted = _columns(str(path), file.schema_arrow.names, required, optional)
            number, size, rows = 0, path.stat().st_size, file.metadata.num_rows
            for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=wanted):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", {name: _without_filled(value) for name, value in row.items()}
                _tell_share(size, number - len(batch), number, rows)
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} cannot be read as Parquet: {error}; write it again, or set data.format to what it is"
        ) from error


def _without_filled(value: Any) -> Any:
    """Return a value of Arrow without the keys that objects have where others of the file have one, at any depth."""
    if isinstance(value, Mapping):
        return {key: _without_filled(inner) for key, inner in value.items() if inner is not None}
    return [_without_filled(inner) for inner in value] if isinstance(value, list) else value


def _tell_share(size: int, before: int, now: int, rows: int) -> None:
    """Tell that of a file's bytes as many have been read as of its rows, of which `before` were told of."""
    tell_read(size * now // rows - size * before // rows)


def dataset_rows(path: Path, required: Sequence[str], optional: Sequence[str] = ()) -> Iterator[Row]:
    """Rows of a directory written by `datasets.save_to_disk`; of its `train` split where it has splits."""
    import pyarrow as pa

    try:
        dataset = _saved_dataset(path)
        wanted = _columns(str(path), dataset.column_names, required, optional)
        number, rows = 0, len(dataset)
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        for batch in dataset.with_format(None).select_columns(wanted).iter(batch_size=BATCH_ROWS):
            before = number
            for values in zip(*(batch[name] for name in wanted), strict=True):
                number += 1
                yield f"{path}, row {number}", dict(zip(wanted, map(_without_filled, values), strict=True))
            _tell_share(size, before, number, rows)
    except (OSError, pa.ArrowException, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} cannot be read as a saved data set: {error}; write it again with datasets.save_to_disk"
        ) from error


def _saved_dataset(path: Path) -> Any:
    from datasets import DatasetDict, load_from_disk

    dataset = load_from_disk(str(path))
    if not isinstance(dataset, DatasetDict):
        return dataset
    if "train" not in dataset:
        raise DataError(f"{path} has splits {sorted(dataset)} but no 'train'; point data.path at one of them")
    return dataset["train"]


ROWS: dict[str, Callable[[Path, Sequence[str], Sequence[str]], Iterator[Row]]] = {
    "jsonl": jsonl_rows,
    "csv": csv_rows,
    "parquet": parquet_rows,
    "dataset": dataset_rows,
}


def known_columns(container: str, path: Path, names: Sequence[str]) -> set[str]:
    """Return those of `names` that are columns of a file: of its first row, where rows have keys of their own."""
    return set(next(ROWS[container](path, (), names), ("", {}))[1])


def _columns(where: str, present: list[str], required: Sequence[str], optional: Sequence[str]) -> list[str]:
    """Return the columns to read.

    Raises:
        DataError: a required one is not there, or one is there twice.
    """
    for column in required:
        if column not in present:
            raise _missing_column(where, column, present)
    wanted = present if EVERY_COLUMN in optional else optional
    columns = list(dict.fromkeys([*required, *(name for name in wanted if name in present)]))
    refuse_twins(where, columns, present)
    return columns


def refuse_twins(where: str, columns: Sequence[str], present: Sequence[str]) -> None:
    """Refuse columns of which a file has several with one name: a row as a dict would have the last."""
    for column in columns:
        if present.count(column) > 1:
            raise DataError(
                f"{where}: {present.count(column)} columns have the name {column!r}; write the file with one"
            )


def _missing_column(where: str, column: str, present: list[str]) -> DataError:
    hint = ""
    if column == "text":
        formats = {
            "input_ids": "tokens",
            "messages": "chat",
            "conversations": "chat",
            "completion": "prompt_completion",
        }
        hint = next((f" It has {name}: set data.format to {formats[name]}." for name in formats if name in present), "")
    return DataError(f"{where}: no column {column!r} (data.field).{nearest(column, present)}{hint}")


def short(value: object) -> str:
    """Return at most 60 characters of a value, for a message."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
