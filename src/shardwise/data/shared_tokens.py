"""Tokens of a corpus as a directory for other machines: what the cache holds, the tokenizer, and a hash of each file.

`shardwise data prepare` writes it, and `data.path` takes it in the place of the corpus. It is told by its manifest,
the file that a cached directory has too. The hashes are compared once on each host; sizes whenever it is opened.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType
from typing import Any

from shardwise.cache import cache_root
from shardwise.data.shared_manifest import SHARED, VERSION, SharedTokens
from shardwise.data.store import COMPLETE, build_once, digest
from shardwise.data.tokenizer import MORE_TEMPLATES, VOCABULARY_FILES, TokenizerSource
from shardwise.errors import ConfigError, DataError
from shardwise.job.data_section import DataSection
from shardwise.job.schema import Job

TOKENIZER = "tokenizer"  # directory of the tokenizer beside the columns
TOKENIZER_SUFFIXES = {".json", ".txt", ".model", ".jinja", ".py"}
CONFIGURATION = "tokenizer_config.json"  # says more than which text is which token
BLOCK = 1 << 22
# Keys that are settled in a directory.
OF_THE_CORPUS = ("field", "filter", "max_documents", "added_tokens", "vocabulary_size")


def tokenizer_of(shared: SharedTokens) -> TokenizerSource | None:
    """Return the tokenizer beside the tokens; None where they were token ids without one."""
    if shared.vocabulary is None:
        return None
    return TokenizerSource(shared.directory / TOKENIZER, shared.vocabulary, key="data.path")


def write_shared(
    cached: Path,
    tokenizer: Path | None,
    target: Path,
    rows: dict[str, Any] | None = None,
    beside: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Write a cached directory for other machines.

    Args:
        cached: the directory in the cache.
        tokenizer: that its tokens are of.
        target: an empty directory.
        rows: how they were rendered, for the manifest; None for documents.
        beside: texts of further files, by name.
    """
    known = json.loads((cached / COMPLETE).read_text())
    for file in sorted(cached.glob("*.arrow")):
        shutil.copyfile(file, target / file.name)
    for name, text in beside.items():
        (target / name).write_text(text, encoding="utf-8")
    if tokenizer is not None:
        (target / TOKENIZER).mkdir()
        for file in _tokenizer_files(tokenizer):
            copy = target / TOKENIZER / file.relative_to(tokenizer)  # templates by name lie in a folder
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, copy)
    vocabulary = None if tokenizer is None else vocabulary_hash(tokenizer)
    files = {name: [size, hash_of(target / name)] for name, size in _sizes(target)}
    known[SHARED] = {"version": VERSION, "vocabulary": vocabulary, "rows": rows, "files": files}
    (target / COMPLETE).write_text(json.dumps(known, indent=1))


def check_shared(shared: SharedTokens, job: Job, say: Callable[[str], None]) -> None:
    """Refuse a directory that is not what was written, and a job that asks for something else than it holds.

    Raises:
        ConfigError: a key of the job is settled in the directory.
        DataError: a file is missing, damaged or of another tokenizer.
    """
    for key in OF_THE_CORPUS:
        if getattr(job.data, key) != getattr(DataSection(), key):
            raise ConfigError(
                f"data.{key}={getattr(job.data, key)!r} has no meaning with data.path={job.data.path!r}, whose tokens "
                "are made; leave it out, or give the corpus"
            )
    _check_files(shared, cache_root(job.data.cache_directory), say)
    for key, path in (("data.tokenizer", job.data.tokenizer), ("model.path", job.model.path)):
        if path is not None:
            _check_tokenizer(shared, key, Path(path))


def _check_tokenizer(shared: SharedTokens, key: str, directory: Path) -> None:
    given, own = vocabulary_hash(directory), shared.vocabulary
    if given is not None and own is not None and given != own:
        raise DataError(
            f"data.path={str(shared.directory)!r} holds tokens of another tokenizer than {key}={str(directory)!r}; "
            f"prepare the corpus with that one, or use the one in {shared.directory / TOKENIZER}"
        )


def _check_files(shared: SharedTokens, cache: Path, say: Callable[[str], None]) -> None:
    files = shared.known[SHARED]["files"]
    for name, (size, _) in files.items():
        path = shared.directory / name
        there = path.stat().st_size if path.is_file() else None
        if there != size:
            state = "is missing" if there is None else f"has {there:,} bytes, not {size:,}"
            raise DataError(f"data.path={str(shared.directory)!r}: {name} {state}; copy the directory again")
    states = [(name, (shared.directory / name).stat().st_mtime_ns) for name in files]
    checked = cache / "checked" / digest(str(shared.directory), shared.known[SHARED], *states)
    build_once(checked, lambda target: _check_hashes(shared, target), say)


def _check_hashes(shared: SharedTokens, target: Path) -> None:
    for name, (_, expected) in shared.known[SHARED]["files"].items():
        if hash_of(shared.directory / name) != expected:
            raise DataError(
                f"data.path={str(shared.directory)!r}: {name} is damaged, its hash is another one; copy the directory "
                "again"
            )
    (target / COMPLETE).write_text(json.dumps({"directory": str(shared.directory)}))


def vocabulary_hash(directory: Path) -> str | None:
    """Return a hash of the files that say which text is which token; None where a directory has none."""
    files = [directory / name for name in VOCABULARY_FILES if name != CONFIGURATION]
    hashes = [(path.name, hash_of(path)) for path in files if path.is_file()]
    return digest(*hashes) if hashes else None


def hash_of(path: Path) -> str:
    """Return the hash of a file."""
    content = blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            content.update(block)
    return content.hexdigest()


def _tokenizer_files(directory: Path) -> Iterator[Path]:
    """Yield the files that a tokenizer is opened from; not the index of a model's weights."""
    for path in sorted([*directory.iterdir(), *directory.glob(MORE_TEMPLATES)]):
        is_other = path.name == COMPLETE or path.name.endswith(".index.json")
        if path.suffix in TOKENIZER_SUFFIXES and not is_other:
            yield path


def _sizes(directory: Path) -> Iterator[tuple[str, int]]:
    """Yield files with their sizes, a folder's own before those of its folders: who fetches them makes it first."""
    for path in sorted(directory.rglob("*"), key=lambda path: (len(path.parts), path)):
        if path.is_file():
            yield path.relative_to(directory).as_posix(), path.stat().st_size
