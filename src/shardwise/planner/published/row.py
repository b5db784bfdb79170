"""A row of a table of published measurements: its text by column, its numbers, and what no rule can make of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

LAYER_METRIC = "layer"  # a metric that begins so is the time of one block
_TRUE = ("1", "yes", "true", "on")
_UNSTATED = re.compile(r"-*|\?|n/?a|unknown|un(stated|specified)|not-(stated|specified|known|given)|default|auto")


class Unmapped(Exception):
    """A row from which no configuration can be made, and why."""


@dataclass(frozen=True, eq=False)
class Row:
    """A row of a table; two are the same only where they are one object.

    Attributes:
        text: what stands in each column, without the mark of what a source merely suggests.
        numbers: the columns that are numbers, where they say one.
        suggested: columns whose value ended in `?`.
    """

    text: Mapping[str, str]
    numbers: Mapping[str, float]
    suggested: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        return self.text["row"]

    @property
    def has_experts(self) -> bool:
        return "experts" in self.numbers

    def number(self, column: str, otherwise: float | None = None) -> float:
        """The number of `column`. Raises Unmapped where there is neither it nor `otherwise`."""
        value = self.numbers.get(column, otherwise)
        if value is None:
            raise Unmapped(f"{column} is not stated")
        return value

    def whole(self, column: str, otherwise: float | None = None) -> int:
        return int(self.number(column, otherwise))

    def says(self, column: str) -> bool:
        """Return whether `column` has a value that is not one of the words for nothing."""
        return not _UNSTATED.fullmatch(self.word(column))

    def is_true(self, column: str) -> bool:
        return self.text.get(column, "").lower() in _TRUE

    def word(self, column: str) -> str:
        """Return what stands in `column` in lower case and one word, without what follows a colon."""
        words = self.text.get(column, "").lower().partition(":")[0].strip()
        return re.sub(r"[_ ()]+", "-", words).strip("-")
