"""Rows of a function of the user's own are read as a file of them is, and what it does wrong is named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwise.data.corpus import find_corpus
from shardwise.errors import ConfigError, ShardwiseError, UserCodeError
from shardwise.job.data_section import DataSection

HERE = "tests.data.test_generated"


def documents() -> Iterator[dict[str, str]]:
    yield from ({"text": f"document {number}"} for number in range(3))


def pairs() -> list[dict[str, str]]:
    return [{"prompt": "a", "completion": "b"}]


def texts() -> list[str]:
    return ["a", "b"]


def sets() -> list[dict[str, Any]]:
    return [{"text": "a"}, {"text": {1}}]


def broken() -> None:
    raise ValueError("no rows today")


def needs_more(number: int) -> list[dict[str, str]]:
    return [{"text": "a"}] * number


def test_rows_of_a_function(tmp_path: Path) -> None:
    data = DataSection(path=f"{HERE}:documents", cache_directory=str(tmp_path))
    corpus = find_corpus(data)
    assert [text for text, _ in corpus.texts()] == ["document 0", "document 1", "document 2"]
    assert corpus.identity == find_corpus(data).identity
    assert find_corpus(data.model_copy(update={"path": f"{HERE}:pairs"})).format == "prompt_completion"


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("text", ConfigError, "has no 'text'. Did you mean 'texts'?"),
        ("texts", UserCodeError, "row 0 cannot be written as a JSON object: a str, not a mapping"),
        ("sets", UserCodeError, "row 1 cannot be written as a JSON object: Object of type set"),
        ("broken", UserCodeError, "no rows today"),
        ("needs_more", UserCodeError, "takes (number) and is called with ()"),
    ],
)
def test_a_function_that_returns_no_rows(tmp_path: Path, name: str, kind: type[ShardwiseError], words: str) -> None:
    with pytest.raises(kind) as raised:
        find_corpus(DataSection(path=f"{HERE}:{name}", cache_directory=str(tmp_path)))
    assert words in str(raised.value) and f"data.path='{HERE}:{name}'" in str(raised.value)
