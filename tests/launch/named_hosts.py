"""Hosts on one machine that have names: network namespaces, each with its own host name, /etc/hosts and bound files.

`NamedHosts.tear_down` ends what runs on them, by process number.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.cluster import Cluster

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 300  # for what takes a few on a quiet machine


class NamedHosts:
    """Hosts of these names that reach each other by name.

    Attributes:
        spaces: the network namespaces, in the order of the names.
        directory: where the hosts' own files lie.
    """

    def __init__(self, directory: Path, names: Sequence[str]) -> None:
        self.directory, self.names = directory, list(names)
        self.spaces = Cluster(len(self.names), name=f"nh{os.getpid() % 1_000_000:x}")

    def build(self) -> None:
        """Make the namespaces."""
        lines = "".join(f"{self.spaces.address(index)} {name}\n" for index, name in enumerate(self.names))
        (self.directory / "hosts").write_text(f"127.0.0.1 localhost\n{lines}")
        self.spaces.build()

    def inside(self, host: int, words: Sequence[str], binds: Mapping[str, Path] | None = None) -> list[str]:
        """Return the words that run others on a host.

        Args:
            host: its number.
            words: the command.
            binds: files and directories that the host has at other places.
        """
        places = {"/etc/hosts": self.directory / "hosts", **(binds or {})}
        pairs = [str(part) for place, source in places.items() for part in (source, place)]
        bind = 'for ((; n > 0; n--)); do mount --bind "$1" "$2" || exit 1; shift 2; done'
        become = f'n="$1"; hostname "$2"; shift 2; {bind}; exec "$@"'
        own = ["bash", "-c", become, "bash", str(len(places)), self.names[host], *pairs, *words]
        return ["ip", "netns", "exec", self.spaces.namespace(host), "unshare", "--uts", *own]

    def processes(self, host: int) -> list[int]:
        """Return the processes on a host."""
        listed = subprocess.run(["ip", "netns", "pids", self.spaces.namespace(host)], capture_output=True, text=True)
        return [int(number) for number in listed.stdout.split()]

    def tear_down(self) -> None:
        """End what runs on the hosts, then the hosts."""
        for host in range(len(self.names)):
            for process in self.processes(host):
                kill(process)
        self.spaces.tear_down()
        assert self.spaces.name not in subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout


def kill(process: int) -> None:
    """Kill a process that may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def wait_until(holds: Callable[[], bool], what: str, why: Callable[[], str] = str, seconds: float = SECONDS) -> None:
    """Wait for what others do by themselves; `why` is asked what they said where they do not."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"after {seconds} s it is not so that {what}: {why()}"
        time.sleep(0.2)


def write_program(path: Path, command: str) -> None:
    """Write a program that runs a command of the shell with the program's own arguments behind it."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'#!/bin/sh\n{command} "$@"\n')
    path.chmod(0o755)
