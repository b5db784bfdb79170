"""Types of arguments that several commands share."""

from __future__ import annotations

import argparse


def whole_number(text: str) -> int:
    """Return a whole number from 1, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)
