"""Parts that processes encode: the same bytes as alone, taken up again, and a process that dies is named."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np
import psutil
import pytest

from shardwise.data import tokenized_text
from shardwise.data.parallel_tokenize import PartStore, grouped
from shardwise.data.parts import read_part, write_part
from shardwise.data.prepare import prepare
from shardwise.errors import DataError, WorkerError
from tests.data.conftest import JobMaker
from tests.data.encoders import lengths

SCRIPT = """
import os, signal, sys
from shardwise.data import prepare, tokenized_text
from shardwise.job.schema import Job
tokenized_text.GROUP_CHARACTERS = 200; tokenized_text.FEWEST_GROUPS = 1
extend, calls = prepare.ColumnWriter.extend, []
def dies(self, values):
    calls.append(1)
    if len(calls) > 5:
        os.kill(os.getpid(), signal.SIGKILL)
    extend(self, values)
prepare.ColumnWriter.extend = dies
prepare.prepare(Job.model_validate_json(sys.argv[1]))
"""


def columns(directory: str | None) -> dict[str, bytes]:
    assert directory is not None
    return {path.name: path.read_bytes() for path in Path(directory).iterdir()}


def refused(groups: list[list[str]]) -> Iterator[str]:
    """Yield texts, and refuse what stands behind them."""
    yield from chain.from_iterable(groups)
    raise DataError("row 9 is wrong")


def orphans() -> list[psutil.Process]:
    """Return processes that tokenize for nobody."""
    running = psutil.process_iter(["ppid", "cmdline"])
    return [each for each in running if each.info["ppid"] == 1 and "tokenize_worker" in str(each.info["cmdline"])]


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenized_text, "GROUP_CHARACTERS", 200)
    monkeypatch.setattr(tokenized_text, "FEWEST_GROUPS", 1)


def test_the_cache_is_that_of_one_process(
    text_directory: Path, make_job: JobMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = prepare(make_job(path=str(text_directory)))
    monkeypatch.setattr(tokenized_text, "GROUP_CHARACTERS", 200)
    monkeypatch.setattr(tokenized_text, "FEWEST_GROUPS", 1)
    job = make_job(path=str(text_directory), cache_directory=str(tmp_path / "b"), tokenizer=alone.tokenizer_directory)
    together = prepare(job)
    assert columns(together.directory) == columns(alone.directory)
    assert not list((tmp_path / "b" / "tokens").glob("*.parts"))


def test_parts_are_taken_up_and_ends_are_named(tmp_path: Path) -> None:
    groups = [["a" * number, "b"] for number in range(6)]
    store: PartStore[str] = PartStore(lengths, tmp_path / "parts", 1, fewest=4)
    first = store.encoded(iter(groups))
    assert [next(first)[1][0].tolist() for _ in range(2)] == [[0, 1], [1, 1]] and not store.is_reused
    first.close()
    kept = sorted((tmp_path / "parts").glob("0*-*"))
    kept[0].write_bytes(kept[0].read_bytes()[:-1])  # cut off, as by a machine that lost its power
    again: PartStore[str] = PartStore(lengths, tmp_path / "parts", 1, fewest=4)
    reused = []
    for number, (group, (counts,)) in enumerate(again.encoded(iter(groups))):
        assert group == groups[number] and counts.tolist() == [number, 1]
        reused.append(again.is_reused)
    assert not reused[0] and reused[1]
    with pytest.raises(WorkerError, match=r"has ended \(SIGKILL; the host may .*goes on from the parts in .*parts"):
        list(again.encoded(iter([*groups, ["stop"]])))
    with pytest.raises(DataError, match=r"^row 7 is wrong$"):
        list(again.encoded(iter([*groups, ["wrong"]])))
    for number in (2, 6):  # in this process, and in others
        with pytest.raises(DataError, match=r"^row 7 is wrong$"):
            list(again.encoded(grouped(refused([*groups[:number], ["wrong"]]), lambda item: 1, 3)))
    assert not [child for child in psutil.Process().children() if "tokenize_worker" in " ".join(child.cmdline())]


def test_a_part_is_whole_or_not_there(tmp_path: Path) -> None:
    arrays = [np.arange(5), np.array([], dtype=np.int32)]
    write_part(tmp_path / "part", arrays)
    read = read_part(tmp_path / "part")
    assert read is not None and [array.tolist() for array in read] == [array.tolist() for array in arrays]
    assert read_part(tmp_path / "other") is None
    (tmp_path / "part").write_bytes(b"")
    assert read_part(tmp_path / "part") is None


@pytest.mark.slow
def test_a_killed_run_is_taken_up(text_directory: Path, make_job: JobMaker, tmp_path: Path, small_groups: None) -> None:
    job = make_job(path=str(text_directory), tokenizer=prepare(make_job(path=str(text_directory))).tokenizer_directory)
    job = job.model_copy(update={"data": job.data.model_copy(update={"cache_directory": str(tmp_path / "killed")})})
    ended = subprocess.run([sys.executable, "-c", SCRIPT, job.model_dump_json(exclude_unset=True)])
    assert ended.returncode == -signal.SIGKILL
    parts = [len(list(path.glob("0*-*"))) for path in (tmp_path / "killed" / "tokens").glob("*.parts")]
    assert len(parts) == 1 and parts[0] > 1
    deadline = time.monotonic() + 30
    while any(
        "tokenize_worker" in " ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])
    ):
        assert time.monotonic() < deadline, "a process that tokenizes has outlived the one that started it"
        time.sleep(0.1)
    expected = columns(prepare(make_job(path=str(text_directory), tokenizer=job.data.tokenizer)).directory)
    assert columns(prepare(job).directory) == expected
    assert {path.suffix for path in (tmp_path / "killed" / "tokens").iterdir()} <= {"", ".lock"}
