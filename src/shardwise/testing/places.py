"""Places in code: which frame has done something, and how its file and line are shown."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch

TORCH = str(Path(torch.__file__).parent) + os.sep
PACKAGE = str(Path(__file__).parents[1]) + os.sep
VALUES = f"{PACKAGE}model{os.sep}known_values.py"  # whose modes stand between an operator and who calls it


def frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and those that have called it, the nearest first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def shown_place(file: str, line: int) -> str:
    """Return a file as it is below the package, or its last two names, with a line."""
    short = file.removeprefix(PACKAGE) if file.startswith(PACKAGE) else os.sep.join(file.split(os.sep)[-2:])
    return f"{short}:{line}"


def place_of(frame: FrameType) -> str:
    """Return the place where a frame is."""
    return shown_place(frame.f_code.co_filename, frame.f_lineno)
