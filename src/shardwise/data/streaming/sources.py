"""The shards of a job's source: local files, files that fsspec finds at a URL, or those of a data set on the Hub.

Shards are sorted by path. A Hub name is resolved by `datasets`, which reads the repository's layout and README, so that
configs, splits and revisions mean what they mean there; `HF_ENDPOINT` names another server.
"""

from __future__ import annotations

import json
import os
import posixpath
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.data.compressed import content_suffix
from shardwise.data.corpus import SUFFIXES, Corpus, find_corpus, named_files, words_of_left_out
from shardwise.data.generated import is_function
from shardwise.data.remote_tokens import is_url
from shardwise.data.streaming.definition import Shard
from shardwise.data.streaming.fetch import local_stamp, remote_stamp
from shardwise.errors import ConfigError, DataError
from shardwise.job.data_section import DataSection
from shardwise.words import in_utf_8, one_of

STREAMED = {**SUFFIXES, ".tar": "webdataset"}
CONTAINERS = ("jsonl", "parquet", "webdataset", "dataset")


class FoundShards(NamedTuple):
    """The shards of a source, and how one is read.

    Attributes:
        left_out: files beside them that are not read (`Corpus.left_out`).
    """

    shards: tuple[Shard, ...]
    container: str
    left_out: int = 0


def find_shards(data: DataSection) -> FoundShards:
    """Return the shards that a data section names.

    Raises:
        DataError: there are none, or they cannot be listed.
    """
    if data.dataset is not None:
        return _of_hub(data)
    path = str(data.path)
    if is_function(path):
        raise ConfigError(
            f"data.path={path!r} with data.streaming: rows that a function makes are written to a file first; leave "
            "streaming out"
        )
    if is_url(path):
        return _of_url(data)
    archives = _archives(data)
    return _local(archives, "webdataset", path) if archives else _of_corpus(data)


def describe_listing(listing: FoundShards, data: DataSection) -> str:
    """Return a source's words for the display."""
    where = data.path if data.dataset is None else f"{data.dataset} ({data.dataset_split})"
    size = sum(shard.size for shard in listing.shards)
    count = len(listing.shards)
    shown = f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size:,} bytes"
    shards = f"{count:,} shard{'s' * (count != 1)}"
    return f"stream of {listing.container}: {where}, {shards}, {shown}{words_of_left_out(listing.left_out)}"


def _archives(data: DataSection) -> list[Path]:
    """Return the tars that a local path names, where no format asks for other shards.

    Raises:
        ConfigError: other shards lie beside them.
    """
    if data.format in SUFFIXES.values() or data.format == "dataset":
        return []
    files = named_files(data)
    kinds = {STREAMED.get(content_suffix(file)) for file in files if content_suffix(file) != ".json"} - {None}
    if "webdataset" not in kinds:
        return []
    if others := sorted(map(str, kinds - {"webdataset"})):
        choice = f"set data.format to {one_of(others)}, or " if data.format == "auto" else ""
        raise ConfigError(
            f"data.path={data.path!r} with data.streaming holds WebDataset tars and {' and '.join(others)}; {choice}"
            "give a path of one kind, as DIRECTORY/*.tar"
        )
    return sorted(file for file in files if content_suffix(file) == ".tar")


def _of_corpus(data: DataSection) -> FoundShards:
    corpus = find_corpus(data.model_copy(update={"streaming": False}))
    if corpus.container not in CONTAINERS:
        raise ConfigError(
            f"data.path={data.path!r} with data.streaming holds {corpus.container}: a stream reads JSON lines, "
            "Parquet, WebDataset tars and saved data sets; convert it, or leave streaming out"
        )
    if corpus.container != "dataset":
        return _local(_of_kind(corpus), corpus.container, str(data.path))._replace(left_out=corpus.left_out)
    files = [file for directory in corpus.files for file in _arrow_files(directory)]
    return _local(files, "dataset", str(data.path))


def _of_kind(corpus: Corpus) -> list[Path]:
    """Return the files of a corpus but those that are shards of another kind, which a glob may match too."""
    files = [file for file in corpus.files if STREAMED.get(content_suffix(file), corpus.container) == corpus.container]
    if not files:
        raise DataError(
            f"data.path={corpus.path!r} holds no {corpus.container}; set data.format to auto, or give another path"
        )
    return files


def _arrow_files(directory: Path) -> list[Path]:
    """Return the files of a saved data set in its order, of its `train` split where it has splits."""
    if (directory / "dataset_dict.json").is_file():
        directory = directory / "train"
    try:
        state = json.loads((directory / "state.json").read_text())
        files = [directory / entry["filename"] for entry in state["_data_files"]]
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{directory} cannot be read as a saved data set: {error!r}; write it again") from error
    if state.get("_indices_files"):
        raise DataError(f"{directory} holds an order of its rows beside them; write it after `flatten_indices()`")
    return files


def _local(files: Sequence[Path], container: str, path: str) -> FoundShards:
    shards = []
    for file, name in zip(files, _names(files, Path(path).expanduser()), strict=True):
        absolute = file.absolute()
        try:
            shards.append(Shard(str(absolute), in_utf_8(name), *local_stamp(absolute)))
        except OSError as error:
            raise DataError(f"{file} cannot be read: {error.strerror}; let this user read it") from error
    return FoundShards(tuple(shards), container)


def _names(files: Sequence[Path], path: Path) -> list[str]:
    """Return a name for each file, no two alike: below a directory, or its last part where that will do."""
    last = [file.name for file in files]
    if not path.is_dir() and len(set(last)) == len(last):
        return last
    root = path if path.is_dir() else Path(os.path.commonpath([file.absolute().parent for file in files]))
    return [file.absolute().relative_to(root.absolute()).as_posix() for file in files]


def _of_url(data: DataSection) -> FoundShards:
    from fsspec.core import url_to_fs

    path = str(data.path)
    try:
        system, inner = url_to_fs(path)
        if any(letter in path for letter in "*?["):
            names = system.glob(inner)
        else:
            names = system.find(inner) if system.isdir(inner) else [inner]
        infos = {str(name): system.info(name) for name in sorted(names)}
    except ImportError as error:
        raise ConfigError(f"data.path={path!r}: {error}") from error
    except Exception as error:  # each file system of fsspec has errors of its own
        reason = str(error).strip() or type(error).__name__
        raise DataError(
            f"data.path={path!r} cannot be listed: {type(error).__name__}: {reason}; is its server there?"
        ) from error
    urls = {system.unstrip_protocol(name): info for name, info in infos.items()}
    return _remote(urls, f"data.path={path!r}", data.format)


def _of_hub(data: DataSection) -> FoundShards:
    from datasets import load_dataset_builder
    from fsspec.core import url_to_fs

    where = f"data.dataset={data.dataset!r}"
    split = data.dataset_split
    try:
        builder = load_dataset_builder(str(data.dataset), data.dataset_config, revision=data.dataset_revision)
        files: Any = builder.config.data_files or {}
        if split not in files:
            raise DataError(f"{where} has no split {split!r} (data.dataset_split); use {', '.join(map(str, files))}")
        urls = sorted(str(url) for url in files[split])
        infos = {url: url_to_fs(url)[0].info(url_to_fs(url)[1]) for url in urls}
    except DataError:
        raise
    except Exception as error:  # datasets and huggingface_hub have errors of their own
        first_line = (str(error).strip().splitlines() or [""])[0]
        raise DataError(
            f"{where} cannot be listed: {type(error).__name__}: {first_line}; is the name right, and the Hub "
            "(HF_ENDPOINT) in reach?"
        ) from error
    return _remote(infos, where, data.format)


def _remote(infos: dict[str, dict[str, Any]], where: str, wanted: str) -> FoundShards:
    """Return the shards among files at URLs, all of one kind: the wanted one, where a format names it."""
    kinds = {url: STREAMED.get(content_suffix(Path(posixpath.basename(url)))) for url in infos}
    present = sorted({kind for kind in kinds.values() if kind})
    names = [kind for kind in present if wanted in ("auto", "tokens", kind)]
    if len(names) != 1:
        what = " and ".join(present) or "no shard"
        raise DataError(
            f"{where} with data.format={wanted} holds {what}; a stream reads JSON lines, Parquet or WebDataset tars, "
            "one of them; give a path of one kind, as DIRECTORY/*.jsonl, and the data.format that it has, or auto"
        )
    urls = [url for url, kind in kinds.items() if kind == names[0]]
    places = {url: url.partition("://")[2] for url in urls}
    root = posixpath.commonpath([posixpath.dirname(place) for place in places.values()])
    shards = [Shard(url, places[url].removeprefix(root).lstrip("/"), *remote_stamp(infos[url])) for url in urls]
    return FoundShards(tuple(shards), names[0])
