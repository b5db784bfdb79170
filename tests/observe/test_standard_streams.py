"""Streams that are closed, or lack a character."""

from __future__ import annotations

import io
import sys

import pytest

from shardwise.observe.standard_streams import flush_or_leave, secure_streams


def test_a_character_that_the_encoding_lacks_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    content = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(content, encoding="ascii"))
    secure_streams()
    print("2 · 3", flush=True)
    assert content.getvalue() == b"2 \\xb7 3\n"


@pytest.mark.parametrize("is_gone", [True, False])
def test_streams_that_are_closed_take_text(is_gone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stdout", None if is_gone else closed)
    secure_streams()
    print("text", flush=True)
    flush_or_leave("stdout")
    assert sys.stdout.writable()
    sys.stdout.close()
