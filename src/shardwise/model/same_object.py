"""An object as a key of a cache: a search asks for what follows from one model and one section thousands of times."""

from __future__ import annotations

from typing import Any


class SameObject:
    """Equal for one and the same object, which it keeps alive; facts and sections hold dicts and have no hash."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SameObject) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)
