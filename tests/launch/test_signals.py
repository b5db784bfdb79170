"""SIGTERM, SIGUSR1 and SIGHUP: a worker remembers them, a launcher passes them on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from shardwise.launch import interrupt, local
from shardwise.launch.interrupt import Interrupt, interrupts_held_back
from shardwise.launch.local import run_local
from shardwise.launch.signals import Forwarding, forwarding
from tests.fork_server import Fork, started

ROOT = Path(__file__).parents[2]
REQUESTS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def handlers() -> list[Any]:
    return [signal.getsignal(number) for number in REQUESTS]


@pytest.fixture(autouse=True)
def usual_handlers() -> Iterator[None]:
    before = handlers()
    yield
    for number, handler in zip(REQUESTS, before):
        signal.signal(number, handler)


@pytest.mark.parametrize("number", REQUESTS)
def test_a_signal_is_remembered_with_its_reason(number: signal.Signals) -> None:
    signal.signal(number, signal.SIG_DFL)  # which a measurement of lines may have changed
    with Interrupt(3) as interrupt:
        assert interrupt.reason is None
        signal.raise_signal(number)
        signal.raise_signal(signal.SIGUSR1)
        assert interrupt.reason == f"{number.name} received by rank 3"
    signal.raise_signal(number)  # the same request on another way must not end a process that is about to end well


def test_own_handlers_come_back_even_after_a_signal() -> None:
    got: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
    with Interrupt(0):
        signal.raise_signal(signal.SIGTERM)
    assert not got
    signal.raise_signal(signal.SIGTERM)
    assert got == [signal.SIGTERM]


def test_a_hang_up_that_is_ignored_stays_so() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Interrupt(0) as remembered, forwarding() as forwarded:
        signal.raise_signal(signal.SIGHUP)
        assert (remembered.reason, forwarded.received) == (None, [])
    for is_forwarded in (True, False):
        with local._signals_handled(is_forwarded):
            assert "SIGHUP" not in os.environ[local.SIGNALS_OF_TORCH]


def test_a_hang_up_is_forwarded_or_ends_the_workers() -> None:
    with local._signals_handled(True), forwarding() as forwarded:
        assert os.environ[local.SIGNALS_OF_TORCH] == "SIGINT,SIGQUIT"
        signal.raise_signal(signal.SIGHUP)
        assert forwarded.received == [signal.SIGHUP]
    with local._signals_handled(False):
        assert "SIGHUP" in os.environ[local.SIGNALS_OF_TORCH]


def test_handlers_come_back_after_an_error() -> None:
    before = handlers()
    with pytest.raises(ValueError), Interrupt(0):
        raise ValueError
    assert handlers() == before


def test_a_thread_installs_nothing() -> None:
    seen: list[Any] = []

    def look() -> None:
        with Interrupt(0):
            seen.extend(handlers())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == handlers()


def test_one_request_may_arrive_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupt, "SAME_REQUEST_SECONDS", float("inf"))
    with Interrupt(0) as remembered:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert remembered.reason == "SIGTERM received by rank 0"


TWICE = """
import signal, sys
from shardwise.launch import interrupt
interrupt.SAME_REQUEST_SECONDS = 0.0
with interrupt.Interrupt(0):
    for name in sys.argv[1:]:
        signal.raise_signal(signal.Signals[name])
"""


@pytest.mark.parametrize(
    ("names", "exit_code"),
    [(["SIGTERM", "SIGTERM"], -signal.SIGTERM), (["SIGUSR1", "SIGUSR1", "SIGTERM", "SIGUSR1"], 0)],
)
def test_a_second_sigterm_ends_the_process(names: list[str], exit_code: int) -> None:
    assert subprocess.run([sys.executable, "-c", TWICE, *names]).returncode == exit_code


def test_ctrl_c_waits_until_a_new_process_takes_it() -> None:
    start = "from shardwise.launch.interrupt import take_interrupts"
    code = f"{start}\ntry: print(1), take_interrupts()\nexcept KeyboardInterrupt: print(2)"
    with interrupts_held_back(), subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        child.send_signal(signal.SIGINT)  # while Python starts
        assert child.communicate()[0] == b"1\n2\n"
    assert child.returncode == 0 and signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_each_signal_is_passed_on_once() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        signals = Forwarding()
        signals.send([child.pid])
        signals.note(signal.SIGUSR1, None)
        signals.note(signal.SIGUSR1, None)
        assert signals.received == [signal.SIGUSR1]
        signals.send([child.pid])
        assert child.wait(timeout=100) == -signal.SIGUSR1
        signals.send([child.pid])
    finally:
        child.kill()
        child.wait()


# --- real workers: functions, so that they can be named to spawned processes -----------------------------------------


def heed(directory: Path) -> str:
    """Waits for a signal at its steps, as the trainer does."""
    with Interrupt(int(os.environ["RANK"])) as interrupt:
        present(directory)
        while interrupt.reason is None:
            time.sleep(0.05)
        return interrupt.reason


def ignore(directory: Path) -> None:
    """Hears a signal and goes on for ever."""
    with Interrupt(int(os.environ["RANK"])) as interrupt:
        present(directory)
        while interrupt.reason is None:
            time.sleep(0.05)
        (directory / f"heard-{os.environ['RANK']}").touch()
        time.sleep(600)


def no_handler(directory: Path) -> None:
    present(directory)
    time.sleep(600)


def present(directory: Path) -> None:
    """Whole from the start: a name that appears has its content."""
    partial = directory / f"partial-{os.environ['RANK']}"
    partial.write_text(str(os.getpid()))
    partial.rename(directory / f"rank-{os.environ['RANK']}")


LAUNCHER = """
import sys
from pathlib import Path
from shardwise.launch import signals
from shardwise.launch.local import run_local
from tests.launch import test_signals
if __name__ == "__main__":
    if sys.argv[3] == "twice":
        signals.SAME_REQUEST_SECONDS = 0.0
    function = getattr(test_signals, sys.argv[2])
    print(run_local(function, (Path(sys.argv[1]),), 2, forward_signals=True, max_restarts=2))
"""


def wait_until(condition: Callable[[], Any], seconds: float = 200) -> None:
    """Fails only long after the condition should have come true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.05)


@contextmanager
def launched(directory: Path, function: str, *how: str) -> Iterator[tuple[Fork, list[int]]]:
    """A launcher in a process group of its own, and its two workers, which are at work."""
    (directory / "launcher.py").write_text(LAUNCHER)
    (directory / "tmp").mkdir()
    words = "launcher.py", directory, function, *(how or ["once"])
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
        "TMPDIR": str(directory / "tmp"),
    }
    pids: list[int] = []
    try:
        with started(*words, cwd=directory, env=environment, new_session=True) as launcher:
            notes = [directory / "rank-0", directory / "rank-1"]
            wait_until(lambda: launcher.poll() is not None or all(note.exists() for note in notes))
            pids += [int(note.read_text()) for note in notes]
            yield launcher, pids
            assert not any(map(psutil.pid_exists, pids))
            assert not list((directory / "tmp").iterdir())
    finally:
        for pid in filter(psutil.pid_exists, pids):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(("number", "whole_group"), [(signal.SIGTERM, True), (signal.SIGUSR1, False)])
def test_workers_that_heed_a_signal_return_as_usual(tmp_path: Path, number: signal.Signals, whole_group: bool) -> None:
    with launched(tmp_path, "heed") as (launcher, _):
        if whole_group:  # as Slurm does it: each worker hears it twice
            os.killpg(launcher.pid, number)
        else:
            launcher.send_signal(number)
        out, err = launcher.communicate(timeout=200)
        assert launcher.returncode == 0, err
        assert out == f"['{number.name} received by rank 0', '{number.name} received by rank 1']\n"


@pytest.mark.parametrize("number", REQUESTS)
def test_workers_without_a_handler_die_of_it_and_are_not_restarted(tmp_path: Path, number: signal.Signals) -> None:
    with launched(tmp_path, "no_handler") as (launcher, _):
        launcher.send_signal(number)
        _, err = launcher.communicate(timeout=200)
        assert (launcher.returncode, err) == (128 + number, "")


def test_a_second_sigterm_ends_workers_that_do_not_end(tmp_path: Path) -> None:
    with launched(tmp_path, "ignore", "twice") as (launcher, _):
        launcher.send_signal(signal.SIGTERM)
        wait_until(lambda: launcher.poll() is not None or all((tmp_path / f"heard-{rank}").exists() for rank in (0, 1)))
        launcher.send_signal(signal.SIGTERM)
        _, err = launcher.communicate(timeout=200)
        assert (launcher.returncode, err) == (128 + signal.SIGTERM, "")


def handlers_here() -> None:
    pass


@pytest.mark.slow
def test_the_launchers_own_handlers_come_back() -> None:
    before, variables = handlers(), dict(os.environ)
    assert run_local(handlers_here, (), 1, forward_signals=True) == [None]
    assert (handlers(), dict(os.environ)) == (before, variables)
