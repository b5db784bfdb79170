"""Writes the table of planted faults into docs/how-to/verify.md: `python -m tools.planted_faults`.

What is planted, and what verify has to say of it, is the table `tests/parity/planted_faults.csv`, which the tests hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.parity.planted import KINDS, planted_faults
from tools.page_table import replace_table

PAGE = Path(__file__).parent.parent / "docs" / "how-to" / "verify.md"


def page_with_table(text: str) -> str:
    """Return a page's text with today's table."""
    return replace_table(text, "planted_faults", table_lines())


def table_lines() -> Iterator[str]:
    """Yield the lines of the table, in Markdown."""
    yield "| planted in | faults | runs | in 16 bits | named | placed |"
    yield "|---|---|---|---|---|---|"
    totals = [0] * 5
    for kind in KINDS:
        rows = planted_faults(kind)
        narrow = [row for row in rows if "bf16" in row.keys or "fp16" in row.keys]
        named = [row for row in rows if row.is_named]
        counts = [len({row.fault for row in rows}), len(rows), len(narrow), len(named), len(rows) - len(named)]
        totals = [total + count for total, count in zip(totals, counts, strict=True)]
        yield f"| {kind} | {' | '.join(map(str, counts))} |"
    yield f"| all | {' | '.join(map(str, totals))} |"


if __name__ == "__main__":
    PAGE.write_text(page_with_table(PAGE.read_text()), encoding="utf-8")
