"""Which of several ranks' reports is the cause, and what error it becomes in the launcher."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.errors import ConfigError, DataError, WorkerError
from shardwise.launch import failure
from shardwise.launch.diagnosis import UNGUARDED_EXIT, diagnose_failure


class CorpusError(DataError):
    """A subclass that the launcher need not know."""

    exit_code = 7


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(failure.DIRECTORY_VARIABLE, str(tmp_path))
    monkeypatch.setattr(failure, "PEER_GRACE_SECONDS", 0.0)
    return tmp_path


def report_as(rank: int, error: Exception, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    monkeypatch.setenv("RANK", str(rank))
    try:
        raise error
    except Exception as raised:
        return failure.report(raised)


def test_the_earliest_error_is_the_cause(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, error in ((2, ValueError("first")), (0, ValueError("second")), (2, ValueError("again"))):
        report_as(rank, error, monkeypatch)
    found = failure.collect(directory)
    assert [(f.rank, f.message) for f in found] == [(2, "first"), (0, "second")]
    error = found[0].to_error("output\n")
    assert type(error) is WorkerError and str(error).startswith("rank 2 failed:\noutput\nTraceback")
    assert str(error).endswith("ValueError: first")


def test_an_error_that_repeats_another_ranks_comes_after_it(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report_as(0, WorkerError("rank 1 said so"), monkeypatch)
    report_as(1, DataError("data.path=x is empty; name another"), monkeypatch)
    assert [f.rank for f in failure.collect(directory)] == [1, 0]


def test_a_rank_that_lost_a_dead_peer_is_no_cause(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (directory / "rank-3.pid").write_text(str(gone.pid))
    monkeypatch.setenv("RANK", "0")
    failure.announce(directory)
    assert report_as(1, RuntimeError("Connection closed by peer"), monkeypatch) == [3]
    assert report_as(1, RuntimeError("once more"), monkeypatch) == [3]
    assert report_as(2, DataError("mine"), monkeypatch) == []
    assert [f.rank for f in failure.collect(directory)] == [2, 1]


def test_a_users_error_keeps_its_class_or_the_nearest_known(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report_as(4, CorpusError("data.path=x is empty"), monkeypatch)
    error = failure.collect(directory)[0].to_error("unseen")
    assert type(error) is DataError and str(error) == "rank 4: data.path=x is empty" and error.exit_code == 7


def test_an_error_that_says_whose_it_is_is_left_at_that(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report_as(0, DataError("rank 1: x is damaged"), monkeypatch)
    assert str(failure.collect(directory)[0].to_error("unseen")) == "rank 1: x is damaged"


def test_a_script_without_a_guard_is_named(directory: Path) -> None:
    diagnosis = diagnose_failure(directory, 0, 2, {0: UNGUARDED_EXIT, 1: -signal.SIGKILL})
    assert isinstance(diagnosis.error, ConfigError)
    assert diagnosis.repeats
    assert 'if __name__ == "__main__":' in diagnosis.summary


def test_without_a_launcher_of_ours_nothing_is_written(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(failure.DIRECTORY_VARIABLE)
    assert report_as(0, ValueError("x"), monkeypatch) == [] and not list(directory.iterdir())
