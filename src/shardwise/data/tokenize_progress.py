"""Progress of tokenizing: a bar on a terminal, a line every few seconds elsewhere.

The time left is by bytes of the corpus' files, as they lie on the disk: those that have been read or, where groups are
read ahead, those of the groups that have been tokenized.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from shardwise.data.compressed import reads_heard

Say = Callable[[str], None]
Item = TypeVar("Item")

SECONDS_BETWEEN_REPORTS = 5.0
SECONDS_BETWEEN_DRAWINGS = 0.2


class TokenizeProgress(AbstractContextManager["TokenizeProgress"]):
    """Reports on a corpus while it is read in the block.

    Args:
        size: bytes of the files.
        unit: what is counted besides tokens, documents or rows.
        say: hears of it where stderr is no terminal.
    """

    def __init__(self, size: int, unit: str, say: Say) -> None:
        self._size, self._unit, self._say = max(size, 1), unit, say
        self._heard, self._read, self._is_skipping = 0, 0, False
        self._ends: deque[int] | None = None  # bytes that are read at the end of each group that is read ahead
        self._began = (time.monotonic(), 0, 0)  # seconds, bytes and tokens when the first part was not there
        self._next = 0.0
        self._bar: Progress | None = None
        self._open = ExitStack()

    def __enter__(self) -> TokenizeProgress:
        self._open.enter_context(reads_heard(self._hear))
        console = Console(stderr=True)
        if console.is_terminal:
            columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"))
            self._bar = self._open.enter_context(Progress(*columns, console=console, transient=True))
            self._bar.add_task("", total=self._size)
        self._next = time.monotonic() + self._pause
        return self

    @property
    def _pause(self) -> float:
        return SECONDS_BETWEEN_REPORTS if self._bar is None else SECONDS_BETWEEN_DRAWINGS

    def _hear(self, count: int) -> None:
        self._heard = min(self._heard + count, self._size)
        if self._ends is None:
            self._read = self._heard

    def read_ahead(self, groups: Iterable[Item]) -> Iterator[Item]:
        """Yield groups that are tokenized later; `next_group` tells of each that it is."""
        self._ends = deque()
        for group in groups:
            self._ends.append(self._heard)
            yield group

    def next_group(self, is_reused: bool) -> None:
        """Take the next group for tokenized; the pace leaves out one that was not tokenized now."""
        assert self._ends is not None
        self._read = self._ends.popleft()
        self._is_skipping = self._is_skipping or is_reused

    def advance(self, count: int, tokens: int) -> None:
        """Report, if it is time to, that so many documents or rows and tokens have been written."""
        now = time.monotonic()
        if self._is_skipping:
            self._began, self._is_skipping = (now, self._read, tokens), False
        if now < self._next:
            return
        self._next = now + self._pause
        text = f"{count:,} {self._unit}, {tokens:,} tokens{self._pace(now, tokens)}"
        if self._bar is None:
            self._say(f"tokenizing: {text}")
        else:
            self._bar.update(self._bar.task_ids[0], completed=self._read, description=text)

    def _pace(self, now: float, tokens: int) -> str:
        began, read_before, tokens_before = self._began
        seconds, read = now - began, self._read - read_before
        if seconds <= 0 or read <= 0:
            return ""
        left = round(seconds * (self._size - self._read) / read)
        return f", {(tokens - tokens_before) / seconds:,.0f} tokens/s, about {left // 60}:{left % 60:02} left"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()
