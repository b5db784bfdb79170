"""Directories of checkpoints: the newest ones are kept."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardwise.smp.v2.logger import get_logger

# Names that are of checkpoints without a doubt: `llama_v2-20steps`, `step_20`, `checkpoint-20`.
STEPS = r".*\d+steps?$|.*[-_]\d+$"
RANKS = re.compile(r"[te]p\d+[-_].*")  # `tp2-0`, `ep2-1`, `tp0_ep0_fsdp1`: below a checkpoint, of some of the ranks


def SORT_BY_LAST_INT(name: str | Path) -> int:
    """Sorting key: the last number in a name; -1 where there is none."""
    numbers = re.findall(r"\d+", Path(name).name)
    return int(numbers[-1]) if numbers else -1


def limit_num_subdirs(
    dir: str | Path,  # SMP's name of it
    num_keep: int | None,
    sort_fn: Callable[[Any], Any] | None = None,
    regex: str | None = STEPS,
    log: bool = True,
) -> None:
    """Remove all but the last `num_keep` subdirectories whose names match, by their last number unless `sort_fn` gives
    another order; nothing where `num_keep` is none or 0.

    Scripts pass the directory of all checkpoints, or that of the one they have just written or are about to, or what
    a tensor rank has there: then the parent of the checkpoint is meant. A directory that is not there is no error,
    since ranks and asynchronous saves come at any time.
    """
    root, pattern = Path(dir), re.compile(regex or STEPS)
    if not num_keep or num_keep < 0:
        return
    if not _matching(root, pattern):
        while RANKS.fullmatch(root.name):
            root = root.parent
        root = root.parent if pattern.fullmatch(root.name) else root
    ordered = sorted(_matching(root, pattern), key=lambda path: (sort_fn or SORT_BY_LAST_INT)(path.name))
    for path in ordered[:-num_keep]:
        if log:
            get_logger().info("removing %s: %d checkpoints are kept", path, num_keep)
        shutil.rmtree(path, ignore_errors=True)


def _matching(root: Path, pattern: re.Pattern[str]) -> list[Path]:
    if not root.is_dir():
        return []
    return [path for path in root.iterdir() if path.is_dir() and not path.is_symlink() and pattern.fullmatch(path.name)]
