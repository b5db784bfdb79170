"""Workers that die or fail are started again together, up to `max_restarts`, unless that cannot help."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from shardwise.errors import DataError, LegalityError, ShardwiseError, WorkerError
from shardwise.launch import failure
from shardwise.launch.diagnosis import diagnose_failure, logs_of, reports_of
from shardwise.launch.interrupt import Interrupt
from shardwise.launch.local import run_local
from tests.fork_server import call


def attempt(directory: Path) -> int:
    """Which attempt this worker belongs to; leaves a note that it was there."""
    number = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    (directory / f"{number}-{os.environ['RANK']}").write_text(str(os.getpid()))
    return number


def attempts(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.is_file())


def nobody_left(directory: Path) -> bool:
    return not any(psutil.pid_exists(int((directory / name).read_text())) for name in attempts(directory))


def be_killed_once(directory: Path) -> tuple[int, int]:
    """Rank 1 dies without a word; rank 0 hears SIGTERM and goes on, as a worker at its steps does."""
    number = attempt(directory)
    if number == 0:
        if os.environ["RANK"] == "1":
            while not (directory / "0-0").exists():
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
        with Interrupt(0):
            time.sleep(600)
    return number, int(os.environ["RANK"])


def fail_each_time(directory: Path) -> None:
    """Another rank each time, so that a report of an earlier attempt would show."""
    number = attempt(directory)
    if int(os.environ["RANK"]) == number % 2:
        raise ValueError(f"attempt {number}\nin two lines")
    time.sleep(600)


def be_mistaken(directory: Path, when: int) -> None:
    if attempt(directory) == when:
        raise LegalityError("tensor_parallel_degree=3 does not divide 16; use 4", rule="tensor")
    raise ValueError("not mine")


def leave_silently(directory: Path) -> None:
    attempt(directory)
    if os.environ["RANK"] == "1":
        os._exit(0)
    time.sleep(600)


def test_all_start_again_after_one_was_killed(
    tmp_path: Path, empty_directory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert call(run_local, be_killed_once, (tmp_path,), 2, forward_signals=True, max_restarts=2) == [(1, 0), (1, 1)]
    assert capfd.readouterr().err == (
        "restart 1 of 2: rank 1 of 2 was killed by SIGKILL (signal 9), which is what the kernel does to a process when "
        "memory runs out\n"
    )
    assert attempts(tmp_path) == ["0-0", "0-1", "1-0", "1-1"] and nobody_left(tmp_path)
    assert not list(empty_directory.iterdir())


def test_the_last_attempts_error_is_the_runs(
    tmp_path: Path, empty_directory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(WorkerError) as caught:
        call(run_local, fail_each_time, (tmp_path,), 2, max_restarts=1)
    assert str(caught.value).startswith("after 1 restart: rank 1 failed:\n")
    assert str(caught.value).endswith("ValueError: attempt 1\nin two lines")
    assert "attempt 0" not in str(caught.value)
    assert capfd.readouterr().err == "restart 1 of 1: rank 0: ValueError: attempt 0\n"
    assert nobody_left(tmp_path) and not list(empty_directory.iterdir())


@pytest.mark.parametrize(("when", "start"), [(0, "rank 0: tensor"), (1, "after 1 restart: rank 0: tensor")])
def test_a_users_mistake_is_not_retried(tmp_path: Path, when: int, start: str) -> None:
    with pytest.raises(LegalityError) as caught:
        call(run_local, be_mistaken, (tmp_path, when), 1, max_restarts=3)
    assert str(caught.value).startswith(start) and caught.value.exit_code == 2
    assert attempts(tmp_path) == [f"{number}-0" for number in range(when + 1)]


def test_a_worker_that_leaves_without_a_result_has_failed(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"^rank 1 of 2 ended with exit code 0 and no error of its own$"):
        call(run_local, leave_silently, (tmp_path,), 2)
    assert nobody_left(tmp_path)


# --- what a failure was, from the reports of one attempt -------------------------------------------------------------


def report(directory: Path, number: int, rank: int, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setattr(failure, "PEER_GRACE_SECONDS", 0.0)
    failure.announce(reports_of(directory, number))
    failure.report(error)


def test_reports_of_another_attempt_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_FAILURE_DIRECTORY", "")
    report(tmp_path, 0, 0, DataError("data.path=x is empty"), monkeypatch)
    report(tmp_path, 1, 1, ValueError("boom"), monkeypatch)
    first, second, third = (diagnose_failure(tmp_path, number, 2, {1: 1}) for number in range(3))
    assert (type(first.error), first.repeats) == (DataError, True) and first.summary == "rank 0: data.path=x is empty"
    assert (type(second.error), second.repeats) == (WorkerError, False) and second.summary == "rank 1: ValueError: boom"
    assert third.summary == "rank 1 of 2 ended with exit code 1 and no error of its own"


def test_the_last_words_are_those_of_the_rank_on_a_further_host_too(tmp_path: Path) -> None:
    """Torch names the directories of a host's ranks 0, 1, ..."""
    for local in range(2):
        place = logs_of(tmp_path) / "run" / "attempt_0" / str(local)
        place.mkdir(parents=True)
        (place / "stderr.log").write_text(f"of local rank {local}")
    words = str(diagnose_failure(tmp_path, 0, 4, {3: -signal.SIGSEGV}, first_rank=2).error)
    assert words.startswith("last lines that rank 3 wrote to stderr:\n  of local rank 1\nrank 3 of 4 was killed")


def test_an_error_says_how_many_restarts_were_made(tmp_path: Path) -> None:
    def error(restarts: int) -> ShardwiseError:
        return diagnose_failure(tmp_path, restarts, 4, {3: -signal.SIGSEGV}).after(restarts)

    killed = "rank 3 of 4 was killed by SIGSEGV (signal 11)"
    assert [str(error(n)) for n in range(3)] == [killed, f"after 1 restart: {killed}", f"after 2 restarts: {killed}"]
