"""Tables that a tool writes into a page, between two marks."""

from __future__ import annotations

from collections.abc import Iterable

END = "<!-- end of the table -->"


def replace_table(text: str, tool: str, lines: Iterable[str]) -> str:
    """Return a page's text with `lines` for the table that `python -m tools.TOOL` writes."""
    begin = f"<!-- Written by `python -m tools.{tool}` from the table that the tests hold. -->"
    before, _, rest = text.partition(begin)
    after = rest.partition(END)[2]
    return "\n".join([f"{before}{begin}", "", *lines, "", f"{END}{after}"])
