"""The manifest of a directory of tokens, by which `data.path` is known to name one rather than a corpus."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.data.remote_tokens import fetched, is_url
from shardwise.data.store import COMPLETE
from shardwise.errors import DataError
from shardwise.job.data_section import DataSection

VERSION = 1  # of the manifest
SHARED = "shared"  # in the manifest: what a cached directory does not say


@dataclass(frozen=True)
class SharedTokens:
    """A directory of tokens and its manifest, `known`."""

    directory: Path
    known: dict[str, Any]

    @property
    def vocabulary(self) -> str | None:
        """Hash of the tokenizer's files; None where there is none."""
        value: str | None = self.known[SHARED]["vocabulary"]
        return value

    @property
    def rows(self) -> dict[str, Any] | None:
        """Return how rows of conversations were rendered; None where the tokens are of documents."""
        value: dict[str, Any] | None = self.known[SHARED].get("rows")
        return value

    @property
    def format(self) -> str:
        """Return the `data.format` of what it holds."""
        return "tokens" if self.rows is None else str(self.rows["format"])


def find_shared(data: DataSection) -> SharedTokens | None:
    """Return the directory of tokens that `data.path` names; None where it names something else.

    Raises:
        DataError: its manifest is of another version.
    """
    if data.path is None:
        return None
    directory = fetched(data.path, data.cache_directory) if is_url(data.path) else Path(data.path).absolute()
    if directory is None:
        return None
    try:
        known = json.loads((directory / COMPLETE).read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(known, dict) or SHARED not in known:
        return None
    version = known[SHARED].get("version")
    if version != VERSION:
        raise DataError(
            f"data.path={data.path!r} holds tokens of layout {version}, and this shardwise reads {VERSION}; write it "
            "again with `shardwise data prepare`"
        )
    return SharedTokens(directory, known)
