"""Words that messages share: files with close names, and output that is not broken in a pipe."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.table import Table

from shardwise.words import nearest_file, output_console


def test_a_file_is_meant_by_its_own_name_not_by_its_directorys(tmp_path: Path) -> None:
    assert nearest_file(tmp_path / "job.yaml", ".yaml") == " There is no .yaml file beside it."
    for name in ("train_text.yaml", "notes.txt"):
        (tmp_path / name).touch()
    assert nearest_file(tmp_path / "train_txt.yaml", ".yaml") == f" Did you mean {str(tmp_path / 'train_text.yaml')!r}?"
    assert nearest_file(tmp_path / "job.yaml", ".yaml") == " There are train_text.yaml beside it."
    assert nearest_file(tmp_path / "note.txt") == f" Did you mean {str(tmp_path / 'notes.txt')!r}?"
    assert nearest_file(tmp_path / "corpus") == ""
    assert "There is no directory" in nearest_file(tmp_path / "no" / "corpus")


def test_a_pipe_breaks_no_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    name = "transformer.h.0.attention.query_key_value.weight" * 4
    table = Table()
    table.add_column("tensor", overflow="fold")
    table.add_row(name)
    output_console().print(table)
    assert name in capsys.readouterr().out
