"""Live runs: a file in the output directory by which `shardwise inspect` finds the ranks that a host's launcher has."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from shardwise.errors import OutputError
from shardwise.launch.watch.announced import AnnouncedRank, announced_ranks

PREFIX = ".launcher-"


@dataclass(frozen=True)
class LiveLauncher:
    """A launcher that runs: its host, its process, and the directory below which its ranks announce themselves."""

    host: str
    pid: int
    directory: str


@contextmanager
def live_launcher(output: Path | None, host: str, directory: Path) -> Iterator[None]:
    """Let `shardwise inspect OUTPUT` find this launcher meanwhile; None: it has no output directory."""
    if output is None:
        yield
        return
    file = output / f"{PREFIX}{host}.json"
    with suppress(OSError):  # of a disk that is full the run itself will say so
        file.write_text(json.dumps(asdict(LiveLauncher(host, os.getpid(), str(directory)))), encoding="utf-8")
    try:
        yield
    finally:
        with suppress(OSError):
            file.unlink()


def live_ranks(output: Path, host: str) -> list[AnnouncedRank]:
    """Return the ranks of a live run on this host.

    Raises:
        OutputError: no launcher of it runs here.
    """
    files = sorted(output.glob(f"{PREFIX}*.json"))
    launchers = [LiveLauncher(**json.loads(file.read_text(encoding="utf-8"))) for file in files]
    own = next((launcher for launcher in launchers if launcher.host == host), None)
    elsewhere = ", ".join(launcher.host for launcher in launchers if launcher.host != host)
    if own is None and elsewhere:
        raise OutputError(f"{str(output)!r}: its launchers run on {elsewhere}, this is {host}; ask there")
    if own is None or not psutil.pid_exists(own.pid) or not _is_own(Path(own.directory)):
        raise OutputError(
            f"{str(output)!r} is no live run of yours: it has ended, or torchrun or Slurm has started its ranks; give "
            "the output directory of a run whose workers shardwise has started"
        )
    attempts = sorted(Path(own.directory).glob("attempt-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    return announced_ranks(attempts[-1]) if attempts else []


def _is_own(directory: Path) -> bool:
    """Return whether a directory is this user's alone: what it names is opened and signalled."""
    try:
        status = directory.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022
