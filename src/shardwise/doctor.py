"""`shardwise doctor`: what this machine offers to a run, and which optional packages are there."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from importlib import metadata

from rich.table import Table
from rich.text import Text

PACKAGES = ("shardwise", "torch", "transformers", "tokenizers", "datasets", "safetensors")
GIB = 2**30


def examine() -> Table:
    """A table of versions, devices, backends, host resources and extras."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    for key, value in (*_versions(), *_host(), *_devices(), *_backends(), *_extras()):
        table.add_row(key, Text(value))  # Text: brackets in it are no markup
    return table


def _versions() -> Iterator[tuple[str, str]]:
    yield "python", platform.python_version()
    for name in PACKAGES:
        yield name, _version(name) or "not installed"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _host() -> Iterator[tuple[str, str]]:
    import psutil

    memory = psutil.virtual_memory()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield "cores", f"{usable} usable of {os.cpu_count()}"
    yield "memory", f"{memory.available / GIB:.1f} GiB free of {memory.total / GIB:.1f} GiB"


def _devices() -> Iterator[tuple[str, str]]:
    from torch import cuda

    if not cuda.is_available():
        yield "devices", "cpu (CUDA is not available)"
        return
    for index in range(cuda.device_count()):
        device = cuda.get_device_properties(index)
        yield f"cuda:{index}", f"{device.name}, {device.total_memory / GIB:.0f} GiB"


def _backends() -> Iterator[tuple[str, str]]:
    from torch import distributed

    there = [name for name in ("gloo", "nccl", "mpi") if distributed.is_backend_available(name)]
    yield "backends", ", ".join(there) or "none"


def _extras() -> Iterator[tuple[str, str]]:
    """The extras of this package and what is missing of each, from the package's own metadata."""
    wanted: dict[str, list[str]] = {}
    for requirement in metadata.requires("shardwise") or []:
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", requirement)
        package = re.match(r"[\w.-]+", requirement)
        if extra and package:
            wanted.setdefault(extra[1], []).append(package[0])
    for name, packages in sorted(wanted.items()):
        missing = [package for package in packages if _version(package) is None]
        how = f"missing {', '.join(missing)}: pip install 'shardwise[{name}]'"
        yield f"extra {name}", how if missing else "installed"
