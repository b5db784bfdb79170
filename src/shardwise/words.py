"""Words that messages share: lists of names, the nearest name to a mistyped one, plural forms, notes on stderr."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


PASSWORD = re.compile(r"(?<=://)[^/@:]*:[^/@]*(?=@)")


def without_password(url: str) -> str:
    """Return a URL with `***` in the place of a user and a password that it holds."""
    return PASSWORD.sub("***", url)


def in_utf_8(name: str) -> str:
    """Return the name of a file as text files can hold it: bytes that are no UTF-8 are written out."""
    return name.encode(errors="backslashreplace").decode()


def divisors(number: int) -> list[int]:
    """Return the divisors of `number`, ascending."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def one_of(values: Iterable[object]) -> str:
    """Return `1, 2 or 4`."""
    *most, last = [str(value) for value in values]
    return f"{', '.join(most)} or {last}" if most else last


def say_note(note: str) -> None:
    """Print a note on stderr, where it does not mix with what a command prints."""
    print(f"note: {note}", file=sys.stderr)


def listed(names: Iterable[str], most: int = 4, separator: str = ", ") -> str:
    """Return the first of `names`, and how many more there are."""
    names = list(names)
    return separator.join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


LISTED = 60  # names that a message lists, at most
FILE_CUTOFF = 0.7  # likeness of two names, from which one may be meant by the other
PIPED_WIDTH = 10_000  # columns, so that a name can be found with grep


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ` Did you mean 'x'?` for the closest of `known`, or the list of them when nothing is close."""
    known = sorted(known)
    close = [name for name in known if name.lower() == word.lower()]  # `adamw` is further from AdamW than from Adam
    close = close or difflib.get_close_matches(word, known, n=1, cutoff=0.55)
    return f" Did you mean {close[0]!r}?" if close else f" Known: {listed(known, LISTED)}."


def nearest_file(path: Path, *suffixes: str) -> str:
    """Return what a message says of a path that is not there: the one beside it with a close name, or what there is.

    Args:
        path: what was looked for.
        suffixes: of the files that may be meant; none: files and directories of any name.
    """
    if not path.parent.is_dir():
        return f" There is no directory {str(path.parent)!r}."
    names = sorted(name for name in os.listdir(path.parent) if not suffixes or name.endswith(suffixes))
    # By the name without its suffix: a shared directory or suffix makes no two names alike.
    stems = {Path(name).stem: name for name in reversed(names)}
    close = difflib.get_close_matches(path.stem, stems, n=1, cutoff=FILE_CUTOFF)
    if close:
        return f" Did you mean {str(path.parent / stems[close[0]])!r}?"
    if suffixes and not names:
        return f" There is no {' or '.join(suffixes)} file beside it."
    return f" There are {listed(names)} beside it." if suffixes else ""


def output_console() -> Console:
    """Return the console of a command's output: as wide as the terminal, or so wide in a pipe that nothing breaks."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = PIPED_WIDTH
    return console
