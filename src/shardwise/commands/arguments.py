"""Arguments that several commands share: their types, and what is asked of them before anything starts."""

from __future__ import annotations

import argparse
from pathlib import Path

from shardwise.errors import OutputError


def whole_number(text: str) -> int:
    """Return a whole number from 1, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def check_writable(path: Path) -> None:
    """Refuse a `--json` file that could not be written once the work is done.

    Raises:
        OutputError: with the reason.
    """
    try:
        path.touch()
    except OSError as error:
        raise OutputError(f"--json {path} cannot be written: {error}; give a file in a directory that can") from error
