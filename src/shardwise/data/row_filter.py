"""The rows of a corpus that `data.filter` keeps, by conditions on columns or by a function of the user's own."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.data.store import digest
from shardwise.errors import ConfigError, UserCodeError
from shardwise.job.data_section import Filter
from shardwise.job.objects import check_arguments, defined_at, in_parentheses, load_object, user_code

EVERY_COLUMN = "*"


class RowFilter:
    """One `data.filter`.

    Attributes:
        columns: that it reads.
        identity: changes when it may keep other rows: with the conditions, or with the file of the function.
    """

    def __init__(self, wanted: Filter) -> None:
        self.wanted = wanted
        self.columns = [EVERY_COLUMN] if isinstance(wanted, str) else list(wanted or ())
        self._what = f"data.filter={wanted!r}"
        if not isinstance(wanted, str):
            self.identity = digest(sorted((wanted or {}).items()))
            return
        self._function: Any = load_object(wanted, "data.filter")
        check_arguments(self._function, ("row",), self._what)
        self.identity = digest(wanted, _source_of(self._function, self._what))

    @staticmethod
    def asks_for_numbers(wanted: Filter) -> bool:
        """Return whether some column has to be a number, or true or false."""
        wishes = wanted.values() if isinstance(wanted, Mapping) else ()
        return any(
            isinstance(wish, Mapping)
            or not all(isinstance(one, str) for one in (wish if isinstance(wish, list) else [wish]))
            for wish in wishes
        )

    def keeps(self, where: str, row: Mapping[str, Any]) -> bool:
        """Return whether a row is read.

        Raises:
            UserCodeError: the function raises, or returns something else than true or false.
        """
        if isinstance(self.wanted, str):
            return self._answer(where, row)
        return all(_holds(row.get(column), wish) for column, wish in (self.wanted or {}).items())

    def _answer(self, where: str, row: Mapping[str, Any]) -> bool:
        with user_code(f"{self._what} at {where}"):
            answer = self._function(dict(row))
        if not isinstance(answer, bool):
            place = in_parentheses(defined_at(self._function))
            raise UserCodeError(f"{self._what} returned {answer!r} at {where}; it must return true or false{place}")
        return answer


def _holds(value: Any, wish: Any) -> bool:
    """Return whether a column's value is the one wished for, one of a list, or within bounds; a missing one is not."""
    if isinstance(wish, Mapping):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and wish.get("min", value) <= value <= wish.get("max", value)
    if isinstance(wish, list):
        return any(_holds(value, one) for one in wish)
    return bool(value == wish) and isinstance(value, bool) == isinstance(wish, bool)


def _source_of(function: Any, what: str) -> str:
    """Return a hash of the file in which a function is written."""
    try:
        return digest(Path(str(inspect.getsourcefile(inspect.unwrap(function)))).read_bytes())
    except (TypeError, OSError) as error:
        raise ConfigError(
            f"{what} has no file with its source ({error}), so that nobody could tell when it changes; give a function "
            "of a module of your own"
        ) from error
