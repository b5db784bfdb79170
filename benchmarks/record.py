"""What every benchmark writes beside its numbers: date, commit, machine and versions."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil


def header(packages: Iterable[str]) -> dict[str, Any]:
    """Date, commit, machine, versions of the installed ones of `packages`."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "machine": {
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
            "system": platform.platform(),
            "python": platform.python_version(),
        },
        "versions": {name: version for name in packages if (version := _version(name))},
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write through a temporary file, so that an interrupted run leaves the last whole result."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    temporary.replace(path)


def _commit() -> str:
    """The checkout's commit, with `+changes` when the working tree differs from it; `unknown` outside of git."""
    root = Path(__file__).resolve().parents[1]
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True)
        state = subprocess.run(["git", "status", "--porcelain"], cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit.stdout.strip() + ("+changes" if state.stdout.strip() else "")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
