"""The cache of what would cost time to make again: tokens, tokenizers, the compiled engine."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root(configured: str | None = None) -> Path:
    """Return `configured`, else `$XDG_CACHE_HOME/shardwise`, else `~/.cache/shardwise`."""
    if configured is not None:
        return Path(configured).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "shardwise"
