"""Writes the table of building habits into docs/how-to/own-module.md: `python -m tools.habits`.

The table is that of `tests/habits/table.py`, which the tests hold against plain torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.habits.table import HABITS, LAYOUTS, Habit
from tools.page_table import replace_table

PAGE = Path(__file__).parent.parent / "docs" / "how-to" / "own-module.md"


def page_with_table(text: str) -> str:
    """Return a page's text with today's table."""
    return replace_table(text, "habits", table_lines())


def table_lines() -> Iterator[str]:
    """Yield the lines of the table, in Markdown."""
    yield "| habit | works | costs | refused |"
    yield "|---|---|---|---|"
    for habit in HABITS:
        yield f"| {habit.words} | {_joined(habit.works())} | {habit.costs} | {_refused(habit)} |"


def _refused(habit: Habit) -> str:
    return f"{_joined(list(habit.refused))}: {habit.remedy}" if habit.refused else ""


def _joined(layouts: Sequence[str]) -> str:
    """Return the layouts in words, shorter where they are all of them or most."""
    others = [layout for layout in LAYOUTS if layout not in layouts]
    if not others:
        return "everywhere"
    if len(others) < len(layouts):
        return f"all but {', '.join(others)}"
    return ", ".join(layouts)


if __name__ == "__main__":
    PAGE.write_text(page_with_table(PAGE.read_text()), encoding="utf-8")
