"""The pool of ranks: what it gives back, and that no way of failing goes unnamed or leaves a process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from shardwise.testing.world import WorldError, WorldPool


def summed_rank(offset: int) -> tuple[int, float, int]:
    total = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(total)
    return dist.get_world_size(), total.item(), os.getpid()


def surroundings() -> tuple[str, str, int, int]:
    return os.environ["SHARDWISE_TEST_WORD"], os.getcwd(), torch.get_num_threads(), torch.initial_seed()


def raise_on(rank: int, together: bool) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"boom on {rank}")
    if together:
        dist.all_reduce(torch.ones(1))


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def hang_on(rank: int) -> str:
    if dist.get_rank() == rank:
        sleep_for_ever()
    return "fine"


def sleep_for_ever() -> None:
    while True:
        time.sleep(1)


def unpicklable() -> object:
    return lambda: None


@pytest.fixture(scope="module")
def pool() -> Iterator[WorldPool]:
    """A pool of our own: these tests break it."""
    with WorldPool(limit=4, timeout=60) as pool:
        yield pool


def gone(pids: list[int]) -> bool:
    return all(not psutil.pid_exists(pid) for pid in pids)


def test_every_rank_answers_and_workers_are_reused(pool: WorldPool) -> None:
    first = pool.run(3, summed_rank, 10)
    second = pool.run(2, summed_rank, 0)
    assert [answer[:2] for answer in first] == [(3, 33.0)] * 3
    assert [answer[:2] for answer in second] == [(2, 1.0)] * 2
    assert [answer[2] for answer in second] == [answer[2] for answer in first[:2]]


def test_ranks_see_the_surroundings_of_the_test(
    pool: WorldPool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SHARDWISE_TEST_WORD", "seen")
    monkeypatch.chdir(tmp_path)
    assert pool.run(2, surroundings) == [("seen", str(tmp_path), 1, 0)] * 2


@pytest.mark.parametrize("together", [False, True], ids=["alone", "others wait for it"])
def test_a_rank_that_raises_fails_the_run_with_its_traceback_last(pool: WorldPool, together: bool) -> None:
    with pytest.raises(WorldError) as caught:
        pool.run(3, raise_on, 1, together)
    error = caught.value
    assert error.first == 1 and error.reports[1].what == "raised ValueError"
    assert "in raise_on" in error.reports[1].text and str(error).endswith("ValueError: boom on 1")
    assert set(error.reports) == ({0, 1, 2} if together else {1})
    assert len(pool.run(3, summed_rank, 0)) == 3


def test_a_killed_rank_is_named_with_its_signal_and_replaced(pool: WorldPool) -> None:
    before = pool.run(3, summed_rank, 0)
    with pytest.raises(WorldError) as caught:
        pool.run(3, die_on, 2)
    assert caught.value.reports[2].what == "died: SIGKILL"
    assert all("all_reduce" in caught.value.reports[rank].text for rank in (0, 1))
    after = pool.run(3, summed_rank, 0)
    assert before[2][2] not in [answer[2] for answer in after] and gone([before[2][2]])


def test_a_hanging_rank_is_named_with_its_traceback_and_replaced(pool: WorldPool) -> None:
    before = pool.run(2, summed_rank, 0)
    with pytest.raises(WorldError) as caught:
        pool.run(2, hang_on, 1, timeout=2)
    assert set(caught.value.reports) == {1} and caught.value.reports[1].what == "hangs"
    assert "sleep_for_ever" in caught.value.reports[1].text
    assert pool.run(2, summed_rank, 0)[0][:2] == (2, 1.0) and gone([before[1][2]])


def test_a_rank_that_cannot_join_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    with WorldPool(limit=2, timeout=60) as pool:
        monkeypatch.setenv("GLOO_DEVICE_TRANSPORT", "pigeon")  # which torch keeps for the life of a process
        with pytest.raises(WorldError) as caught:
            pool.run(2, summed_rank, 0)
        assert all("init_process_group" in report.text for report in caught.value.reports.values())
        monkeypatch.delenv("GLOO_DEVICE_TRANSPORT")
        assert [answer[:2] for answer in pool.run(2, summed_rank, 0)] == [(2, 1.0)] * 2


def test_an_answer_that_cannot_be_sent_is_an_error_of_that_rank(pool: WorldPool) -> None:
    with pytest.raises(WorldError, match="pickle"):
        pool.run(1, unpicklable)


def test_more_ranks_than_the_pool_holds_are_refused(pool: WorldPool) -> None:
    with pytest.raises(ValueError, match="use 1 to 4"):
        pool.run(5, summed_rank, 0)


def test_close_leaves_no_process_and_no_file() -> None:
    with WorldPool(limit=2) as pool:
        pool.run(2, summed_rank, 0)
        pids, directory = pool.pids, Path(pool._directory.name)
        assert len(pids) == 2 and directory.exists()
    assert gone(pids) and not directory.exists()


OWNER = """
import os, signal, sys
from pathlib import Path
from shardwise.testing.world import WorldPool
from tests.testing.test_world import hang_on, summed_rank
if __name__ == "__main__":
    pool = WorldPool(limit=2, preload=("torch",))
    pool.run(2, summed_rank, 0)
    Path(sys.argv[1]).write_text(" ".join(map(str, pool.pids)))
    if sys.argv[2] == "busy":
        pool.run(2, hang_on, 1)
"""


@pytest.fixture
def short_directory() -> Iterator[Path]:
    """A temporary directory with room behind it: the path of a socket has at most 107 bytes."""
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)


@pytest.mark.slow
@pytest.mark.parametrize("end", [pytest.param("forgotten", marks=pytest.mark.slow), "busy"])
def test_workers_end_with_the_test_session(tmp_path: Path, short_directory: Path, end: str) -> None:
    script, note = tmp_path / "owner.py", tmp_path / "pids"
    script.write_text(OWNER)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path]),
        "TMPDIR": str(short_directory),  # SIGKILL leaves no chance to tidy up
    }
    owner = subprocess.Popen([sys.executable, str(script), str(note), end], env=environment)
    try:
        wait_until(lambda: note.exists() and len(note.read_text().split()) == 2)
        pids = [int(word) for word in note.read_text().split()]
        if end == "busy":
            owner.kill()  # SIGKILL, in the middle of a run
        owner.wait(timeout=60)
        wait_until(lambda: gone(pids))
    finally:
        owner.kill()
        owner.wait()


def wait_until(condition: object, seconds: float = 120) -> None:
    """Fails only long after the condition should have come true."""
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.05)
