"""`shardwise checkpoint verify`: whether the bytes of a checkpoint are those that were written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rich.table import Table
from rich.text import Text

from shardwise.checkpoint.bar import byte_bar
from shardwise.checkpoint.catalog import checkpoints, find, find_store, is_checkpoint, manifest_alone
from shardwise.checkpoint.checked_file import CheckedFile
from shardwise.checkpoint.inspect import Page, Say, print_page, size_text
from shardwise.checkpoint.manifest import BLOCK_BYTES, FILE, OLDER, Manifest
from shardwise.checkpoint.stores import Store
from shardwise.errors import CheckpointError, DamagedError, IncompleteError
from shardwise.errors.exit_codes import DISAGREEMENT, DONE
from shardwise.words import listed

Advance = Callable[[int], None]


@dataclass
class FileReport:
    """The state of one file: each damage as a sentence, and the tensors with bytes in any of them."""

    name: str
    bytes: int
    damages: list[str] = field(default_factory=list)
    tensors: list[str] = field(default_factory=list)


def verify_files(store: Store, name: str) -> list[FileReport]:
    """Hash every block of every file of a checkpoint and compare with its manifest; nothing ends it early.

    Where the manifest is damaged, there is nothing to compare with, and it alone is reported.

    Raises:
        CheckpointError: it has no manifest, one of a newer version, or cannot be read.
    """
    try:
        manifest = manifest_alone(store, name)
    except DamagedError as error:
        why = str(error).removeprefix(f"{store.root}/{name}/{FILE} ").removesuffix(OLDER)
        return [FileReport(FILE, len(store.read(name, FILE)), [why])]
    try:
        sizes = store.sizes(name)
    except OSError as error:
        raise CheckpointError(f"{store.root}/{name} cannot be read: {error}") from error
    with byte_bar(f"verifying {name}", manifest.total_bytes) as advance:
        return [_verified(store, name, file, manifest, sizes.get(file), advance) for file in manifest.files]


def _verified(store: Store, name: str, file: str, manifest: Manifest, size: int | None, advance: Advance) -> FileReport:
    record = manifest.files[file]
    report = FileReport(file, record.bytes)
    if size != record.bytes:
        report.damages.append("is missing" if size is None else f"has {size} of {record.bytes} bytes")
        first = 0 if size is None else min(size, record.bytes)
        report.tensors += manifest.tensors_at(file, first, record.bytes)
    readable = 0 if size is None else -(-min(size, record.bytes) // BLOCK_BYTES)
    with CheckedFile(store, name, file, manifest) as source:
        for number in range(readable):
            start, stop = number * BLOCK_BYTES, min((number + 1) * BLOCK_BYTES, record.bytes)
            if size is not None and stop <= size:  # else it is cut off, which was said
                _check_block(source, number, start, stop, report)
            advance(stop - start)
    report.tensors = list(dict.fromkeys(report.tensors))
    return report


def _check_block(source: CheckedFile, number: int, start: int, stop: int, report: FileReport) -> None:
    try:
        source.block(number)
    except CheckpointError as error:
        why = "cannot be read" if isinstance(error.__cause__, OSError) else "other bytes than were written"
        report.damages.append(f"{why} at {start} to {stop}")
        report.tensors += source.manifest.tensors_at(source.file, start, stop)


def verification(place: str, reports: Sequence[FileReport]) -> Page:
    """The page of `verify`: the table, and under it the tensors of each damaged file."""
    yield Text(place, "bold")
    table = Table()
    table.add_column("file", no_wrap=True)
    table.add_column("size", justify="right")
    table.add_column("blocks", justify="right")
    table.add_column("verdict")
    for report in reports:
        verdict = Text("; ".join(report.damages), "bold red") if report.damages else Text("ok")
        table.add_row(Text(report.name), size_text(report.bytes), f"{-(-report.bytes // BLOCK_BYTES):,}", verdict)
    yield table
    yield from (Text(_sentence(report)) for report in reports if report.damages)
    yield Text(_verdict(reports))


def _sentence(report: FileReport) -> str:
    if report.name == FILE:
        return f"without {FILE} it cannot be known what the files hold and whether they are whole"
    return f"{report.name} is damaged there; it holds {listed(report.tensors) or 'no tensor, but its header'}"


def _verdict(reports: Sequence[FileReport]) -> str:
    bad = sum(bool(report.damages) for report in reports)
    total = size_text(sum(report.bytes for report in reports))
    if bad:
        return f"{bad} of {len(reports)} files damaged{OLDER}"
    return f"{len(reports)} files, {total}: every block is as it was written"


def verify_checkpoint(path: str, say: Say) -> int:
    """`shardwise checkpoint verify`: 1 where anything is damaged, the manifest included.

    Raises:
        CheckpointError: there is nothing to verify at `path`.
    """
    store, name = find(path) if is_checkpoint(path) else _newest_finished(path, say)
    reports = verify_files(store, name)
    print_page(verification(f"{store.root}/{name}", reports))
    return DISAGREEMENT if any(report.damages for report in reports) else DONE


def _newest_finished(path: str, say: Say) -> tuple[Store, str]:
    """Return the newest that was written to its end: `find` would pass over a damaged one, which is asked for."""
    store = find_store(path)
    for name in checkpoints(store):
        try:
            manifest_alone(store, name)
        except IncompleteError as error:
            say(f"checkpoint {name} is passed over: {error}")
            continue
        except CheckpointError:
            pass  # verifying it says what is wrong
        say(f"the newest finished checkpoint of {store.root} is {name}")
        return store, name
    raise CheckpointError(f"{store.root} holds no finished checkpoint; `shardwise checkpoint ls` says what there is")
