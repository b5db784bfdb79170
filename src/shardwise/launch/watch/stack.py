"""Python stacks as faulthandler writes them, and the one place in them that says what a rank is doing."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

import shardwise

THREAD_LINE = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-fA-F]+)")
FRAME_LINE = re.compile(r'^\s*File "(.*)", line (\d+) in (.*)$')
TORCH, PACKAGE = Path(torch.__file__).parent, Path(shardwise.__file__).parent
COLLECTIVES = str(TORCH / "distributed" / "distributed_c10d.py")
PIPELINING = str(TORCH / "distributed" / "pipelining")
WAITING_FUNCTIONS = ("join", "wait", "acquire")  # of Python's threading


@dataclass(frozen=True)
class StackFrame:
    """A line of code that is being run, or that has called the one inside of it."""

    file: str
    line: int
    function: str

    @property
    def is_package(self) -> bool:
        """True for a line of this package."""
        return Path(self.file).is_relative_to(PACKAGE)

    @property
    def is_library(self) -> bool:
        """True for a line of Python's library or of an installed package."""
        if self.is_package:
            return False
        return self.file.startswith("<") or any(Path(self.file).is_relative_to(place) for place in _library_places())

    @property
    def short_file(self) -> str:
        """The file from the package's name on, or its name alone."""
        path = Path(self.file)
        return str(path.relative_to(PACKAGE.parent)) if self.is_package else path.name

    def __str__(self) -> str:
        return f"{self.short_file}:{self.line} in {self.function}"


Stacks = dict[int, tuple[StackFrame, ...]]


def parse_stacks(text: str) -> Stacks:
    """Return the stack of each thread by its identity, the innermost frame first."""
    stacks: dict[int, list[StackFrame]] = {}
    frames: list[StackFrame] = []
    for line in text.splitlines():
        if thread := THREAD_LINE.match(line):
            frames = stacks.setdefault(int(thread[1], 16), [])
        elif frame := FRAME_LINE.match(line):
            frames.append(StackFrame(frame[1], int(frame[2]), frame[3]))
    return {thread: tuple(frames) for thread, frames in stacks.items()}


def telling_stack(stacks: Stacks, main: int) -> tuple[StackFrame, ...]:
    """Return the main thread's stack, or that of the thread of this package which it waits for: a save's, say."""
    stack = stacks.get(main, ())
    caller = telling_frame(stack)
    waits = bool(stack) and stack[0].function.lstrip("_").startswith(WAITING_FUNCTIONS) and stack[0].is_library
    if not waits or caller is None or not caller.is_package:
        return stack
    folder = Path(caller.file).parent
    for thread, other in stacks.items():
        if thread != main and any(frame.is_package and Path(frame.file).parent == folder for frame in other):
            return other
    return stack


def telling_frame(stack: Sequence[StackFrame]) -> StackFrame | None:
    """Return the innermost frame of the user's own code or of this package; None without any."""
    return next((frame for frame in stack if not frame.is_library), None)


def collective_of(stack: Sequence[StackFrame]) -> str:
    """Return the operation of torch.distributed that a stack waits in, for those without a name; empty for none."""
    inside = list(_library_frames(stack))
    calls = [frame.function for frame in inside if frame.file == COLLECTIVES and not frame.function.startswith("_")]
    if calls:
        return calls[-1]
    if inside and inside[0].file.startswith(PIPELINING) and "wait" in inside[0].function:
        return "batch_isend_irecv of a stage"
    return ""


def _library_frames(stack: Sequence[StackFrame]) -> Iterator[StackFrame]:
    """Yield the frames inside of the one that tells."""
    for frame in stack:
        if not frame.is_library:
            return
        yield frame


@cache
def _library_places() -> tuple[Path, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    return (TORCH.parent, *(Path(sysconfig.get_path(name)) for name in names))
