"""Rows that processes render and tokenize: the bytes and the messages of one process, taken up after a kill."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwise.data import tokenized_rows, tokenized_text
from shardwise.data.prepare import prepare
from shardwise.data.tokenize_progress import TokenizeProgress
from shardwise.errors import DataError
from shardwise.job.schema import Job
from tests.data.chats import CHATS, as_messages, chat_job

SCRIPT = """
import os, signal, sys
from shardwise.data import prepare, row_cache, tokenized_rows, tokenized_text
from shardwise.job.schema import Job
tokenized_text.GROUP_CHARACTERS, tokenized_rows.FEWEST_GROUPS = 1500, 1
tokens, groups = row_cache.tokenized_rows, []
def dies(*arguments):
    for group in tokens(*arguments):
        groups.append(group)
        if len(groups) > 3:
            os.kill(os.getpid(), signal.SIGKILL)
        yield group
row_cache.tokenized_rows = dies
prepare.prepare(Job.model_validate_json(sys.argv[1]))
"""
CHAT_ROWS = [{"messages": as_messages(turns)} for turns in CHATS] * 4
PAIRS = [
    {"prompt": f"{n}+{n}?", "chosen": f" {2 * n}", "rejected": " I do not know"[: 5 + n], "source": "not read"}
    for n in range(1, 20)
]


def cached(job: Job) -> dict[str, bytes]:
    directory = prepare(job).directory
    assert directory is not None
    return {path.name: path.read_bytes() for path in Path(directory).iterdir()}


def elsewhere(job: Job, cache: Path) -> Job:
    return job.model_copy(update={"data": job.data.model_copy(update={"cache_directory": str(cache)})})


def make_groups_small(monkeypatch: pytest.MonkeyPatch, processes: int) -> None:
    monkeypatch.setattr(tokenized_text, "GROUP_CHARACTERS", 1500)
    monkeypatch.setattr(tokenized_rows, "FEWEST_GROUPS", 1 if processes else 1000)
    monkeypatch.setattr(tokenized_rows, "usable_cores", lambda: processes)


def wrong_rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [{"messages": as_messages(turns)} for turns in CHATS * 3]
    rows[10] = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": " "}]}
    rows[11] = {"messages": []}
    rows[16] = {"messages": [{"role": "nobody", "content": "Hi"}]}
    return rows


def test_groups_change_nothing_and_the_first_wrong_row_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = chat_job(tmp_path, CHAT_ROWS, format="chat")
    whole = cached(job)
    make_groups_small(monkeypatch, 0)
    assert cached(elsewhere(job, tmp_path / "other")) == whole
    job = chat_job(tmp_path, wrong_rows(), format="chat")
    rows = Path(str(job.data.path))
    rows.write_text("".join(line if n != 11 else "{\n" for n, line in enumerate(rows.open())))
    with pytest.raises(DataError, match=r"rows\.jsonl, line 11, message 2 of messages: an empty content"):
        prepare(job)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 3])
@pytest.mark.parametrize(("form", "rows"), [("chat", CHAT_ROWS), ("prompt_completion", PAIRS), ("preference", PAIRS)])
def test_the_cache_is_that_of_one_process(
    form: str, rows: list[dict[str, Any]], processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{**row, "completion": row["chosen"]} for row in rows] if form == "prompt_completion" else rows
    job = chat_job(tmp_path, rows, format=form)
    alone = cached(job)
    make_groups_small(monkeypatch, processes)
    assert cached(elsewhere(job, tmp_path / "other")) == alone
    assert not list((tmp_path / "other" / "rows").glob("*.parts"))


@pytest.mark.slow
def test_the_first_wrong_row_of_several_processes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_groups_small(monkeypatch, 3)
    with pytest.raises(DataError, match=r"rows\.jsonl, line 11, message 2 of messages: an empty content"):
        prepare(chat_job(tmp_path, wrong_rows(), format="chat"))
    assert not list((tmp_path / "cache" / "rows").glob("*.parts"))


@pytest.mark.slow
def test_a_killed_run_is_taken_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = chat_job(tmp_path, CHAT_ROWS, format="chat")
    expected = cached(job)
    job = elsewhere(job, tmp_path / "killed")
    ended = subprocess.run([sys.executable, "-c", SCRIPT, job.model_dump_json(exclude_unset=True)])
    assert ended.returncode == -signal.SIGKILL
    (parts,) = (tmp_path / "killed" / "rows").glob("*.parts")
    assert len(list(parts.glob("0*-*"))) > 3
    make_groups_small(monkeypatch, 1)
    reused: list[bool] = []
    monkeypatch.setattr(TokenizeProgress, "next_group", lambda self, is_reused: reused.append(is_reused))
    assert cached(job) == expected
    assert sum(reused) > 3 and not parts.exists()
