"""What the commands share: numbers from words, and notes beside the output."""

from __future__ import annotations

import argparse
import sys


def count(text: str) -> int:
    """A whole number from 1, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def say_note(note: str) -> None:
    """A note on stderr, where it does not mix with what a command prints."""
    print(f"note: {note}", file=sys.stderr)
