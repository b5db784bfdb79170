"""Corpora shared by the parity tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.jobs import write_text, write_tokens


@pytest.fixture(scope="session")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with tokens.jsonl and text.txt."""
    directory = tmp_path_factory.mktemp("parity")
    write_tokens(directory)
    write_text(directory)
    return directory
