"""Clients of clusters that note what they are asked and answer as a test says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


class FakeClients:
    """Programs on a PATH of their own, each a small bash script."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.log = directory / "calls.txt"
        directory.mkdir()

    def add(self, program: str, body: str = "") -> None:
        """Put a program there; `$*` are its words in `body`."""
        path = self.directory / program
        path.write_text(f'#!/bin/bash\necho "{program} $*" >> "{self.log}"\n{body}\n')
        path.chmod(0o755)

    def calls(self) -> list[str]:
        """Return what was asked since the last call."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return lines


@pytest.fixture
def clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeClients:
    """No client but those that a test adds."""
    made = FakeClients(tmp_path / "bin")
    for program in ("bash", "sh", "cat", "mkdir", "setsid", "sleep", "rm", "rmdir", "sed", "cut"):
        found = next((place for place in ("/bin", "/usr/bin") if os.path.exists(f"{place}/{program}")), None)
        if found:
            (made.directory / program).symlink_to(f"{found}/{program}")
    monkeypatch.setenv("PATH", str(made.directory))
    return made
