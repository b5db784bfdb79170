"""The files that a job reads, what is in them, and how a cache knows that they are still the same.

`find_corpus` resolves `data.path` and `data.format` to a Corpus; `Corpus.texts` and `Corpus.token_rows` then read its
documents in a fixed order: files sorted by path, rows as they stand in the file.
"""

from __future__ import annotations

import glob
import io
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from shardwise.data.compressed import content_suffix
from shardwise.data.conversations import COLUMNS, format_of_columns, texts_of
from shardwise.data.generated import generated_rows, is_function
from shardwise.data.readers import BESIDE_TOKENS, ROWS, Row, known_columns, pieces, text_file, text_pieces, token_ids
from shardwise.data.remote_tokens import refuse_password
from shardwise.data.row_filter import RowFilter
from shardwise.data.shared_manifest import find_shared
from shardwise.data.store import digest
from shardwise.errors import ConfigError, DataError
from shardwise.job.data_section import ROW_FORMATS, DataSection, DataSource
from shardwise.job.schema import Job
from shardwise.words import in_utf_8, nearest_file

SUFFIXES = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"
}  # fmt: skip
IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"}
SAVED_DATASET = ("state.json", "dataset_dict.json")  # files that datasets.save_to_disk writes
KEYS_OF_SOURCE = DataSource.model_fields.keys() & DataSection.model_fields.keys()  # each means what it means of `data`
NOT_STDLIB = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    """Files with documents in them. `container` is how a file is read: text, jsonl, csv, parquet or dataset."""

    format: str
    container: str
    files: tuple[Path, ...]
    column: str
    max_documents: int | None
    identity: str  # changes when the documents would
    size: int  # bytes
    path: str | None = None  # data.path, for messages
    filter: RowFilter | None = None  # the rows that are read; None: all
    left_out: int = 0  # *.json of a directory whose rows are in *.jsonl

    def describe(self) -> str:
        """For the display."""
        where = "the Python standard library" if self.format == "stdlib" else in_utf_8(str(_common(self.files)))
        files = f"{len(self.files):,} file{'s' * (len(self.files) != 1)}"
        size = f"{self.size / 1e6:.1f} MB" if self.size >= 1e5 else f"{self.size:,} bytes"
        return f"{self.format}: {where}, {files}, {size}{words_of_left_out(self.left_out)}"

    def emptiness(self, unit: str) -> str:
        """Return the message for a corpus in which no document has any `unit`."""
        is_row = self.format in ROW_FORMATS
        column = "" if self.container == "text" or is_row else f" in its column {self.column!r} (data.field)"
        kept = "" if self.filter is None else f" of those that data.filter={self.filter.wanted!r} keeps"
        unit_of_file = "row" if is_row else "document"
        return (
            f"data.path={self.path!r} is empty: no {unit_of_file}{kept} has any {unit}{column} ({self.describe()}); "
            "give a path with text, or leave data.path out for the standard library's sources"
        )

    def texts(self) -> Iterator[tuple[str, bool]]:
        """(text, is the document's last piece) of at most `max_documents` documents that have any text."""
        count = 0
        for text, last in self._pieces():
            yield text, last
            count += last
            if count == self.max_documents:
                return

    def _pieces(self) -> Iterator[tuple[str, bool]]:
        for path in self.files:
            if self.container == "text":
                yield from text_file(path)
            elif self.format in ROW_FORMATS:
                for _, row in self._rows(path, (), COLUMNS):
                    for text in texts_of(row):
                        yield from pieces(io.StringIO(text, newline=""))
            else:
                for where, row in self._rows(path, (self.column,), ()):
                    yield from text_pieces(where, row[self.column])

    def rows(self, columns: Sequence[str]) -> Iterator[Row]:
        """At most `max_documents` rows, with those of the columns that they have."""
        every_row = (row for path in self.files for row in self._rows(path, (), columns))
        yield from islice(every_row, self.max_documents)

    def _rows(self, path: Path, required: Sequence[str], optional: Sequence[str]) -> Iterator[Row]:
        """The rows of a file that the filter keeps, with those of the columns that they have and those it reads."""
        if self.filter is None:
            return ROWS[self.container](path, required, optional)
        keeps = self.filter.keeps
        rows = ROWS[self.container](path, required, (*optional, *self.filter.columns))
        return ((where, row) for where, row in rows if keeps(where, row))

    def token_rows(self, limit: int | None) -> Iterator[np.ndarray]:
        """The `input_ids` of at most `max_documents` rows that have any; each id must be below `limit`."""
        count = 0
        for path in self.files:
            for where, row in self._rows(path, (self.column,), BESIDE_TOKENS):
                ids = token_ids(where, row[self.column], row, limit)
                if len(ids):
                    yield ids
                    count += 1
                if count == self.max_documents:
                    return


def data_format(data: DataSection) -> str:
    """`data.format` with `auto` resolved, but of a stream; refuses keys that contradict each other.

    A directory of `shardwise data prepare` holds `tokens`, or rows.
    """
    if data.streaming:
        refuse_password(str(data.path))
        return data.format
    shared = find_shared(data)
    if shared is not None:
        if data.format not in ("auto", shared.format) or data.factory is not None:
            made = "" if shared.rows is None else f" of rows in the format {shared.format}"
            raise ConfigError(
                f"data.path={data.path!r} holds tokens{made} that are made, which data.format={data.format} and "
                "data.factory do not read; leave them out"
            )
        return shared.format
    if data.format == "auto":
        name = "factory" if data.factory else "stdlib" if data.path is None else _infer(data)
    else:
        name = data.format
    needs_path = name not in ("stdlib", "factory")
    if needs_path and data.path is None:
        raise ConfigError(f"data.format={name} needs data.path")
    if not needs_path and data.path is not None:
        raise ConfigError(f"data.path={data.path!r} would not be read with data.format={name}; leave one of them out")
    if (name == "factory") != (data.factory is not None):
        raise ConfigError(f"data.factory={data.factory!r} with data.format={name}: give both, or neither")
    return name


def with_format(job: Job) -> Job:
    """Return the job with the format of its rows, where `auto` finds conversations or pairs: the plan depends on it."""
    if job.data.sources:
        formats = [(source, data_format(data_of_source(job.data, source))) for source in job.data.sources]
        sources = [
            source.model_copy(update={"format": name} if name in ROW_FORMATS else {}) for source, name in formats
        ]
        return job.model_copy(update={"data": job.data.model_copy(update={"sources": sources})})
    name = data_format(job.data)
    if name == job.data.format or name not in ROW_FORMATS:
        return job
    return job.model_copy(update={"data": job.data.model_copy(update={"format": name})})


def data_of_source(data: DataSection, source: DataSource) -> DataSection:
    """Return the data section that reads one of several sources by itself.

    Raises:
        ConfigError: its keys contradict each other.
    """
    keys = {key: getattr(source, key) for key in KEYS_OF_SOURCE}
    if source.path is None and source.dataset is None and source.format == "auto":
        raise ConfigError(
            f"data.sources: {source.label or 'a source'} has neither path nor format; give its path, or format stdlib"
        )
    return data.model_copy(update={"sources": [], "curriculum": [], **keys})


def find_corpus(data: DataSection) -> Corpus:
    """The corpus that a job's data section names."""
    if find_shared(data) is not None:
        raise DataError(
            f"data.path={data.path!r} holds tokens that are made and no corpus, which is needed here (as `shardwise "
            "verify` reads rows again, and a stream its shards); give the corpus"
        )
    name = data_format(data)
    if name == "stdlib":
        files, container, left_out = stdlib_files(), "text", 0
    else:
        paths = _expand(data)
        container = _container(paths, name)
        files = _files(paths, container)
        left_out = _left_out(paths, files) if container == "jsonl" else 0
    _check_columns(data, name, container)
    if not files:
        raise DataError(
            f"data.path={data.path!r}: no file to read with data.format={name}; give another format, or a path with "
            "such files"
        )
    column = "input_ids" if name == "tokens" and data.field == "text" else data.field
    identity, size = _identity(files, name)
    row_filter = None if data.filter is None else RowFilter(data.filter)
    kept = () if row_filter is None else (row_filter.identity,)
    return Corpus(
        format=name,
        container=container,
        files=files,
        column=column,
        max_documents=data.max_documents,
        identity=digest(name, container, column, data.max_documents, identity, *kept),
        size=size,
        path=data.path,
        filter=row_filter,
        left_out=left_out,
    )


def _check_columns(data: DataSection, name: str, container: str) -> None:
    """Refuse what a job says of columns that its files do not have, or have as text alone."""
    if container == "text" and data.field != DataSection().field:
        raise ConfigError(
            f"data.field={data.field!r} with data.format={name}: a text file is one document and has no columns; "
            "leave data.field out, or set data.format to jsonl, csv, parquet, dataset or tokens"
        )
    if container == "text" and data.filter is not None:
        raise ConfigError(
            f"data.filter={data.filter!r} with data.format={name}: a text file is one document and has no columns; "
            "leave data.filter out, or give files with rows"
        )
    if container == "csv" and RowFilter.asks_for_numbers(data.filter):
        raise ConfigError(
            f"data.filter={data.filter!r}: cells of a CSV file are text; ask for text, as {{year: '2024'}}, or give a "
            "function of your own"
        )


def words_of_left_out(left_out: int) -> str:
    """Return what a description of files says of *.json that are left out."""
    return f", without {left_out:,} .json file{'s' * (left_out != 1)}" if left_out else ""


def named_files(data: DataSection) -> tuple[Path, ...]:
    """Return all files that `data.path` names, of any kind, with those in its directories."""
    return _files(_expand(data), "text")


def stdlib_files() -> tuple[Path, ...]:
    """Sources of the running Python's standard library without its tests, in a fixed mixed order.

    By name, the validation sequences (the end of the corpus) would be a few packages late in the alphabet; by a hash of
    the name they are a sample of everything.
    """
    root = sysconfig.get_path("stdlib")
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in NOT_STDLIB]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    if not files:
        raise DataError(f"the Python standard library in {root} has no sources; set data.path")
    return tuple(sorted(files, key=lambda path: digest(path.relative_to(root).as_posix())))


def _expand(data: DataSection) -> list[Path]:
    """The existing file or directory, what the glob matches, or the rows that a function of the user's own makes."""
    path = str(data.path)
    if is_function(path):
        return [generated_rows(path, data.cache_directory)]
    whole = Path(path).expanduser()
    if whole.exists():
        return [whole]
    if any(letter in path for letter in "*?["):
        matches = [Path(match) for match in sorted(glob.glob(str(whole), recursive=True))]
        if matches:
            return matches
        raise DataError(f"data.path={path!r} matches no file; give a file, a directory or another pattern")
    raise DataError(f"data.path={path!r} does not exist.{nearest_file(whole)}")


def _infer(data: DataSection) -> str:
    """The format that `auto` takes: by suffix for a file, by what a directory holds, and by the columns of its rows."""
    paths = _expand(data)
    formats = {_format_of(path) for path in paths}
    if len(formats) > 1:
        raise ConfigError(
            f"data.path={data.path!r} holds {' and '.join(sorted(formats))}; set data.format to one of them"
        )
    container = formats.pop()
    return container if container == "text" else _row_format(data, container, _files(paths, container)) or container


def _row_format(data: DataSection, container: str, files: Sequence[Path]) -> str | None:
    """The format of conversations that the columns make; None where rows are documents."""
    columns = known_columns(container, files[0], [data.field, *COLUMNS]) if files else set()
    name = format_of_columns(columns)
    if name is None or data.field not in columns:
        return name
    raise ConfigError(
        f"data.path={data.path!r} has both a column {data.field!r} of documents and columns of conversations; set "
        f"data.format to {container} for the documents, or to {name}"
    )


def _format_of(path: Path) -> str:
    if path.is_file():
        return SUFFIXES.get(content_suffix(path), "text")
    if any((path / name).is_file() for name in SAVED_DATASET):
        return "dataset"
    suffixes = {content_suffix(file) for file in _walk(path)} - {".json"}
    formats = {SUFFIXES[suffix] for suffix in suffixes if suffix in SUFFIXES}
    if formats == {"csv"} and not suffixes <= SUFFIXES.keys():
        return "text"  # tables lie beside sources and documents, too
    if len(formats) > 1:
        raise ConfigError(
            f"{path} holds files of {' and '.join(sorted(formats))}; set data.format to one of them, or give a path of "
            f"one kind, as {path}/*.jsonl"
        )
    if formats:
        return formats.pop()
    return "image_folder" if suffixes and suffixes <= IMAGE_SUFFIXES else "text"


def _container(paths: list[Path], name: str) -> str:
    if name != "tokens" and name not in ROW_FORMATS:
        return name
    of_text = ("csv",) if name in ROW_FORMATS else ()  # whose cells are no lists of ids
    formats = {_format_of(path) for path in paths} & {"jsonl", *of_text, "parquet", "dataset"}
    if len(formats) != 1:
        kinds = ", ".join(["jsonl", *of_text, "parquet"])
        raise DataError(
            f"{', '.join(map(str, paths[:3]))}: data.format={name} reads {kinds} or a saved data set; give one"
        )
    return formats.pop()


def _files(paths: list[Path], container: str) -> tuple[Path, ...]:
    """Files of the matched paths, directories opened."""
    if container == "dataset":
        for path in paths:
            if not any((path / name).is_file() for name in SAVED_DATASET):
                raise DataError(f"{path} is not a directory written by datasets.save_to_disk; give one that is")
        return tuple(paths)
    files: list[Path] = []
    for path in paths:
        files += _inside(path, container) if path.is_dir() else [path]
    # A glob with ** matches a directory and what is in it, and goes round in links that lead back.
    places = {(os.path.realpath(path.parent), path.name): path for path in reversed(files)}
    return tuple(path for path in files if places[os.path.realpath(path.parent), path.name] is path)


def _inside(folder: Path, container: str) -> list[Path]:
    """Files of a directory in the container's format; *.json only where there is no *.jsonl in it or below."""
    files = _walk(folder)
    if container == "text":
        return files
    fitting = [file for file in files if SUFFIXES.get(content_suffix(file)) == container]
    return [file for file in fitting if content_suffix(file) != ".json"] or fitting


def _left_out(paths: Sequence[Path], files: Sequence[Path]) -> int:
    """Count the *.json of directories that are not among the files."""
    below = {file for path in paths if path.is_dir() for file in _walk(path)}
    return sum(content_suffix(file) == ".json" for file in below.difference(files))


def _walk(folder: Path) -> list[Path]:
    """All files below `folder` that are not hidden, sorted. Links are followed, each directory is read once.

    Raises:
        DataError: a directory cannot be read.
    """
    files = []
    directories = {os.path.realpath(folder)}
    for parent, subfolders, names in os.walk(folder, onerror=_refuse, followlinks=True):
        visible = sorted(name for name in subfolders if not name.startswith("."))
        visible.sort(key=lambda name: Path(parent, name).is_symlink())  # a directory's own name wins
        subfolders[:] = [name for name in visible if _is_new(Path(parent, name), directories)]
        files += [Path(parent, name) for name in names if not name.startswith(".")]
    return sorted(files)


def _refuse(error: OSError) -> None:
    raise DataError(
        f"{error.filename} cannot be read: {error.strerror}; let this user read it, or name the files by a glob"
    ) from error


def _is_new(folder: Path, directories: set[str]) -> bool:
    """Return whether no other name has led to this directory, and remember it."""
    target = os.path.realpath(folder)
    if target in directories:
        return False
    directories.add(target)
    return True


def _identity(files: tuple[Path, ...], name: str) -> tuple[str, int]:
    """(hash of paths, sizes and times; bytes). The standard library: its version, names and sizes."""
    entries: list[tuple[object, ...]] = []
    size = 0
    for top in files:
        for path in _walk(top) if top.is_dir() else [top]:
            try:
                status = path.stat()
            except OSError as error:
                raise DataError(f"{path} cannot be read: {error.strerror}; let this user read it") from error
            size += status.st_size
            when = sys.version if name == "stdlib" else status.st_mtime_ns
            entries.append((str(path.absolute()), status.st_size, when))
    return digest(*entries), size


def _common(files: tuple[Path, ...]) -> Path:
    return files[0] if len(files) == 1 else Path(os.path.commonpath([file.absolute() for file in files]))
