"""Every error of data says what to do about it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise import data

DIRECTORY = Path(data.__file__).parent
WAYS_OUT = ("nearest", "nearest_file", "emptiness", "remedy", "_too_few")  # functions whose words are one
ELSEWHERE = ("error", "message")  # a text that comes with its own


def messages() -> Iterator[tuple[str, ast.expr]]:
    """Yield file and line of each message of a DataError, with its expression."""
    for path in sorted(DIRECTORY.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "DataError" and node.args:
                yield f"{path.relative_to(DIRECTORY)}:{node.lineno}", node.args[0]


def says_what_to_do(message: ast.expr) -> bool:
    parts = list(ast.walk(message))
    text = "".join(str(part.value) for part in parts if isinstance(part, ast.Constant))
    calls = {getattr(part.func, "attr", getattr(part.func, "id", "")) for part in parts if isinstance(part, ast.Call)}
    is_passed_on = any(isinstance(part, ast.Name) and part.id in ELSEWHERE for part in parts) and text.count(" ") < 3
    return "; " in text or bool(calls & set(WAYS_OUT)) or is_passed_on


def test_every_error_of_data_says_what_to_do() -> None:
    found = dict(messages())
    assert len(found) > 50
    assert [place for place, message in found.items() if not says_what_to_do(message)] == []


@pytest.mark.parametrize(
    ("message", "is_said"),
    [("f'{path} is empty'", False), ("f'{path} is empty; fill it'", True), ("f'no {x}.{nearest(x, y)}'", True)],
)
def test_a_way_out_is_seen(message: str, is_said: bool) -> None:
    assert says_what_to_do(ast.parse(message, mode="eval").body) is is_said
