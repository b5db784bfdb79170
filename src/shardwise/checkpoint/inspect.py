"""`shardwise checkpoint ls` and `show`: which ones there are, and what is in one. verification.py has `verify`.

Each question is answered as plain data, which is also what `--json` prints, and shown as a table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from shardwise.checkpoint.catalog import checkpoints, find, find_store, is_checkpoint, read_manifest
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.stores import Store
from shardwise.errors import CheckpointError
from shardwise.words import output_console

LARGEST = 10  # tensors that `show` lists unasked

Say = Callable[[str], None]
Page = Iterable[RenderableType]

# --- ls --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Listed:
    """One checkpoint of a directory; `problem` says why it is not complete, and the rest is of complete ones."""

    name: str
    bytes: int
    problem: str | None = None
    step: int | None = None
    samples: int | None = None
    tokens: int | None = None
    validation_loss: float | None = None
    ranks: int | None = None
    written: str | None = None


def list_checkpoints(path: str) -> tuple[str, list[Listed]]:
    """The directory that holds the checkpoints of `path`, itself or a run's, and what is in it, oldest first.

    A `path` that is a checkpoint is listed alone.

    Raises:
        CheckpointError: there are none.
    """
    if is_checkpoint(path):
        store, name = find(path)
        return store.root, [_listed(store, name)]
    store = find_store(path)
    finished = [_listed(store, name) for name in reversed(checkpoints(store))]
    problem = "it is being written, or was when its run was killed"
    return store.root, finished + [Listed(name, _bytes_of(store, name), problem) for name in store.unfinished()]


def _listed(store: Store, name: str) -> Listed:
    try:
        manifest = read_manifest(store, name)
    except CheckpointError as error:
        place = f"{store.root}/{name}"
        return Listed(name, _bytes_of(store, name), str(error).removeprefix(place).lstrip(" :/"))
    progress = manifest.progress
    return Listed(
        name,
        manifest.total_bytes,
        step=progress.step,
        samples=progress.samples,
        tokens=progress.tokens,
        validation_loss=progress.validation_loss,
        ranks=ranks_of(manifest),
        written=manifest.written,
    )


def _bytes_of(store: Store, name: str) -> int:
    try:
        return sum(store.sizes(name).values())
    except OSError:
        return 0


def ranks_of(manifest: Manifest) -> int | None:
    """Return the number of ranks that wrote a checkpoint."""
    size = manifest.plan.get("world", {}).get("size")
    return size if isinstance(size, int) else None


def listing(root: str, checkpoints: Sequence[Listed]) -> Page:
    """The page of `ls`: the table, and under it why checkpoints are not complete."""
    yield Text(root, "bold")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("checkpoint", no_wrap=True)
    for heading in ("step", "samples", "tokens", "validation", "size", "ranks"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("written (UTC)", no_wrap=True)
    for checkpoint in checkpoints:
        if checkpoint.problem is not None:
            shown = Text(checkpoint.name.removeprefix(".").removesuffix(".partial"))
            table.add_row(shown, *[""] * 4, size_text(checkpoint.bytes), "", "incomplete", style="yellow")
            continue
        loss = "" if checkpoint.validation_loss is None else f"{checkpoint.validation_loss:.4f}"
        counts = (f"{number:,}" for number in (checkpoint.step, checkpoint.samples, checkpoint.tokens))
        ranks, written = str(checkpoint.ranks or ""), Text(when(checkpoint.written))
        table.add_row(Text(checkpoint.name), *counts, loss, size_text(checkpoint.bytes), ranks, written)
    yield table
    yield from (
        Text(f"{checkpoint.name}: {checkpoint.problem}") for checkpoint in checkpoints if checkpoint.problem is not None
    )


# --- show ------------------------------------------------------------------------------------------------------------


def manifest_summary(manifest: Manifest) -> dict[str, Any]:
    """Return what a checkpoint says of itself, apart from its tensors."""
    progress, plan = manifest.progress, manifest.plan
    return {
        "written": manifest.written,
        **progress.model_dump(exclude={"skipped_in_a_row"}),
        "model": _model_name(manifest),
        "ranks": ranks_of(manifest),
        "degrees": plan.get("degrees", {}),
        "dtypes": plan.get("dtypes", {}),
        "optimizer": manifest.optimizer,
        "loss_scale": manifest.scaler.scale,
        "data": manifest.data,
        "ties": manifest.ties,
        "versions": manifest.versions,
        "files": {name: record.bytes for name, record in manifest.files.items()},
        "bytes": manifest.total_bytes,
    }


def _model_name(manifest: Manifest) -> str:
    if manifest.config is None:
        return str(manifest.job.get("model", {}).get("factory") or "a module of the user's own")
    names = manifest.config.get("architectures")
    return ", ".join(map(str, names)) if names and isinstance(names, list) else str(manifest.config.get("model_type"))


def tensor_rows(manifest: Manifest) -> list[dict[str, Any]]:
    """One row a tensor: name, dtype, shape, bytes, and its slices with their file, offset and shape."""
    return [
        {
            "name": name,
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "bytes": manifest.tensor_bytes(name),
            "slices": [{"file": part.file, "offset": part.offset, "shape": part.shape} for part in tensor.slices],
        }
        for name, tensor in manifest.tensors.items()
    ]


def kind_of(name: str) -> str:
    """`model`, `buffer`, `optimizer/KEY` or `random`."""
    kind, _, rest = name.partition("/")
    return f"{kind}/{rest.partition('/')[0]}" if kind == "optimizer" else kind


def contents(place: str, manifest: Manifest, every_tensor: bool) -> Page:
    """The page of `show`: header, sums by kind, and all tensors or the largest."""
    yield Text(place, "bold")
    facts = Table(show_header=False, box=None, pad_edge=False)
    facts.add_column(style="cyan", no_wrap=True)
    facts.add_column(overflow="fold")
    for key, text in _facts(manifest_summary(manifest)):
        facts.add_row(key, Text(text))
    yield from (facts, Text())
    rows = tensor_rows(manifest)
    yield from (_kinds_table(rows), Text())
    largest = rows if every_tensor else sorted(rows, key=lambda row: -row["bytes"])[:LARGEST]
    if len(largest) < len(rows):
        yield Text(f"the {len(largest)} largest of {len(rows)} tensors (--tensors shows all)")
    yield _tensors_table(largest)


def _facts(known: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "written", f"{when(known['written'])} UTC, ranks {known['ranks']} ({_pairs(known['degrees'])})"
    yield (
        "step",
        f"{known['step']:,}: {known['samples']:,} samples, {known['tokens']:,} tokens"
        + (f", {known['skipped']} steps skipped" if known["skipped"] else ""),
    )
    if known["validation_loss"] is not None:
        yield "validation loss", f"{known['validation_loss']:.4f}"
    yield "model", known["model"]
    yield "dtypes", _pairs(known["dtypes"])
    yield (
        "optimizer",
        known["optimizer"] + (f", loss scale {known['loss_scale']:g}" if known["loss_scale"] != 1 else ""),
    )
    for key, value in known["data"].items():
        yield f"data: {key}", str(value)
    yield "data: hash", known["data_hash"]
    for name, others in known["ties"].items():
        yield "tied", f"{name} = {' = '.join(others)}"
    yield "versions", _pairs(known["versions"])
    yield "files", f"{len(known['files'])}, {size_text(known['bytes'])}"


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items())


def _kinds_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table()
    table.add_column("kind", no_wrap=True)
    for heading in ("tensors", "size", "slices"):
        table.add_column(heading, justify="right")
    table.add_column("dtypes")
    for kind in dict.fromkeys(kind_of(row["name"]) for row in rows):
        of_kind = [row for row in rows if kind_of(row["name"]) == kind]
        total, slices = sum(row["bytes"] for row in of_kind), sum(len(row["slices"]) for row in of_kind)
        dtypes = ", ".join(sorted({row["dtype"] for row in of_kind}))
        table.add_row(Text(kind), f"{len(of_kind):,}", size_text(total), f"{slices:,}", dtypes)
    return table


def _tensors_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table()
    table.add_column("tensor", overflow="fold")
    table.add_column("dtype")
    for heading in ("shape", "size", "slices"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        shape = " x ".join(map(str, row["shape"])) or "number"
        table.add_row(Text(row["name"]), row["dtype"], shape, size_text(row["bytes"]), str(len(row["slices"])))
    return table


# --- the commands ----------------------------------------------------------------------------------------------------


def run_ls(path: str, as_json: bool) -> int:
    """`shardwise checkpoint ls`."""
    root, checkpoints = list_checkpoints(path)
    if as_json:
        return _print_json(
            [asdict(checkpoint) | {"complete": checkpoint.problem is None} for checkpoint in checkpoints]
        )
    return print_page(listing(root, checkpoints))


def run_show(path: str, every_tensor: bool, as_json: bool, say: Say) -> int:
    """`shardwise checkpoint show`."""
    store, name = find(path, say)
    manifest = read_manifest(store, name)
    if as_json:
        return _print_json(
            {"path": f"{store.root}/{name}", **manifest_summary(manifest), "tensors": tensor_rows(manifest)}
        )
    return print_page(contents(f"{store.root}/{name}", manifest, every_tensor))


def print_page(page: Page) -> int:
    console = output_console()
    for part in page:
        console.print(part, soft_wrap=isinstance(part, Text))
    return 0


def _print_json(content: Any) -> int:
    print(json.dumps(content, indent=1))
    return 0


# --- words -----------------------------------------------------------------------------------------------------------


def size_text(count: int) -> str:
    """Bytes in binary units."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} B" if units[0] == "B" else f"{size:.1f} {units[0]}"


def when(written: str | None) -> str:
    """ISO time in UTC to the minute."""
    return (written or "")[:16].replace("T", " ")
