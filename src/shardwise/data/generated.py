"""Rows that a function of the user's own makes, as JSON lines in the cache: `data.path: package.module:function`.

Every process calls the function, and the file is named by a hash of what it returns. So ranks that get other rows read
other files, which they find out before training.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from shardwise.cache import cache_root
from shardwise.data.store import COMPLETE, build_once, digest
from shardwise.errors import UserCodeError
from shardwise.job.objects import check_arguments, defined_at, in_parentheses, load_object, user_code

ROWS_FILE = "rows.jsonl"
FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def is_function(path: str) -> bool:
    """Return whether `data.path` names a function rather than files."""
    return FUNCTION.fullmatch(path) is not None


@cache
def generated_rows(path: str, cache_directory: str | None) -> Path:
    """Return the file with the rows that the function at `path` returns or yields.

    Raises:
        ConfigError: there is no such function.
        UserCodeError: it raises, or makes something else than mappings that JSON can hold.
    """
    what = f"data.path={path!r}"
    function = load_object(path, "data.path")
    check_arguments(function, (), what)
    with user_code(what):
        rows = list(function())
    text = "".join(_line(row, number, what, function) for number, row in enumerate(rows))
    directory = cache_root(cache_directory) / "generated" / digest(text)

    def build(target: Path) -> None:
        (target / ROWS_FILE).write_text(text, encoding="utf-8")
        (target / COMPLETE).write_text(json.dumps({"function": path, "rows": len(rows)}))

    build_once(directory, build, lambda text: None)
    return directory / ROWS_FILE


def _line(row: Any, number: int, what: str, function: Callable[..., Any]) -> str:
    try:
        if not isinstance(row, Mapping):
            raise TypeError(f"a {type(row).__name__}, not a mapping")
        return json.dumps(dict(row)) + "\n"
    except (TypeError, ValueError) as error:
        place = in_parentheses(defined_at(function))
        raise UserCodeError(f"{what}: row {number} cannot be written as a JSON object: {error}{place}") from error
