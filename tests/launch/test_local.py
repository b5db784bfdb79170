"""Local workers: what they return, how they fail, and that none outlives its launcher."""

from __future__ import annotations

import atexit
import contextlib
import errno
import multiprocessing
import os
import pty
import signal
import subprocess
import sys
import time
from multiprocessing import synchronize
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from shardwise.commands.train import train
from shardwise.errors import ConfigError, LegalityError, MachineError, WorkerError
from shardwise.errors.exit_codes import FAULT
from shardwise.launch import agent, local
from shardwise.launch.diagnosis import UNGUARDED_EXIT
from shardwise.launch.local import run_local
from shardwise.launch.process_group import process_group
from tests.fork_server import call, started
from tests.launch.greeting import everyone

ROOT = Path(__file__).parents[2]


def one_after_the_other(count: int) -> list[float]:
    """As a script does that leaves its group and joins again: what is left of a group must not lead the next astray."""
    totals = []
    for index in range(count):
        with process_group("cpu", "gloo", 60):
            total = torch.full((1,), float(index))
            dist.all_reduce(total)
            totals.append(total.item())
        time.sleep(0.2 * (os.environ["RANK"] == "0"))  # the other is there before
    return totals


def fail_on_one(how: str) -> None:
    with process_group("cpu", "gloo", 60):
        if dist.get_rank() == 1:
            print("a last word", file=sys.stderr, flush=True)
            fail(how)
        dist.all_reduce(torch.ones(1))


def fail(how: str) -> None:
    if how == "raise":
        raise ValueError("boom")
    if how == "user":
        raise LegalityError("tensor_parallel_degree=3 does not divide 16; use 4", rule="tensor")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(3)


def unpicklable() -> Any:
    return lambda: None


def wait_for_ever(directory: Path, deaf: bool) -> None:
    """Rank 0 waits inside a collective, rank 1 in Python; `deaf` to the SIGINT that torch's workers get by default."""
    if deaf:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    with process_group("cpu", "gloo", 600):
        note = Path(directory) / os.environ["RANK"]
        note.with_suffix(".partial").write_text(f"{os.getpid()} {sys.stdout.isatty()}")
        note.with_suffix(".partial").rename(note)
        if dist.get_rank() == 1:
            time.sleep(600)
        dist.all_reduce(torch.ones(1))


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


@pytest.mark.slow
def test_results_come_back_by_rank(
    empty_directory: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And without Python's locks, as where /dev/shm cannot be written; the results are more than a pipe holds."""

    def refuse(*arguments: object, **settings: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(synchronize.SemLock, "__init__", refuse)
    with pytest.raises(OSError, match="Read-only"):
        multiprocessing.get_context("spawn").Event()
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    text = "costs $$5 ${local_rank}" * 2**14
    before = children()
    assert run_local(everyone, (text,), 2) == [(0, 2.0, text, "127.0.0.1"), (1, 2.0, text, "127.0.0.1")]
    left = [psutil.Process(pid).cmdline() for pid in children() - before]
    assert all("resource_tracker" in " ".join(command) for command in left)  # Python's own, one a process
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert capfd.readouterr().out.splitlines() == ["rank 0 speaks"]
    assert not list(empty_directory.iterdir())


def test_ranks_that_have_left_meet_again() -> None:
    assert call(run_local, one_after_the_other, (3,), 2) == [[0.0, 2.0, 4.0]] * 2


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("how", "kind", "end"),
    [
        ("raise", WorkerError, "ValueError: boom"),
        ("user", LegalityError, "rank 1: tensor_parallel_degree=3 does not divide 16; use 4"),
        ("kill", WorkerError, "rank 1 of 2 was killed by SIGKILL (signal 9), which is what the kernel does to a process"
         " when memory runs out"),
        ("exit", WorkerError, "SystemExit: 3"),
    ],
)  # fmt: skip
def test_the_first_failing_rank_is_the_error(how: str, kind: type, end: str, empty_directory: Path) -> None:
    with pytest.raises(ConfigError if kind is LegalityError else WorkerError) as caught:
        call(run_local, fail_on_one, (how,), 2)
    assert type(caught.value) is kind and str(caught.value).endswith(end)
    assert caught.value.exit_code == (2 if kind is LegalityError else FAULT)
    assert ("  a last word\n" in str(caught.value)) == (kind is WorkerError)
    assert "Connection closed" not in str(caught.value)  # what the other rank says
    assert not list(empty_directory.iterdir())


def fail_beside_nccl(seconds: float) -> None:
    """NCCL's group is left by all ranks together: whoever leaves alone waits, and the process would at its end."""
    with process_group("cpu", "gloo", 60):
        dist.get_backend = lambda *group: "cpu:gloo,cuda:nccl"
        dist.destroy_process_group = lambda *group: time.sleep(seconds)
        atexit.register(time.sleep, seconds)
        if dist.get_rank() == 1:
            raise ValueError("boom")
        time.sleep(seconds)  # in a collective


def test_a_rank_that_fails_does_not_wait_for_others_to_leave_the_group_of_nccl() -> None:
    began, held = time.monotonic(), 400
    with pytest.raises(WorkerError, match=r"rank 1 failed:(.|\n)*ValueError: boom"):
        call(run_local, fail_beside_nccl, (held,), 2)
    assert time.monotonic() - began < held / 2


def fork_and_wait(notes: Path) -> None:
    """Rank 0 forks two processes and waits, rank 1 fails when they run. A daemon is meant to outlive who began it."""
    if os.environ["RANK"] == "1":
        wait_until(lambda: (notes / "kept").exists() and (notes / "orphan").exists())
        raise ValueError("boom")
    for name in ("kept", "orphan"):
        if os.fork() == 0:
            if name == "kept":
                os.setsid()
            (notes / f"{name}.partial").write_text(str(os.getpid()))
            (notes / f"{name}.partial").rename(notes / name)
            time.sleep(600)
    time.sleep(600)


def has_ended(pid: int) -> bool:
    """Also where nobody waits for orphans, which then stay as zombies."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def run_local_with_haste(torch_is_first: bool, *arguments: Any) -> list[Any]:
    """Run it with little time between SIGTERM and SIGKILL; torch may be the first to see a failure."""
    local.SHUTDOWN_SECONDS = 1
    if torch_is_first:
        agent.exit_code = lambda pid: None
    return run_local(*arguments)


@pytest.mark.parametrize("torch_is_first", [False, True])
def test_what_a_killed_rank_has_forked_ends_with_it(torch_is_first: bool, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"rank 1 failed:(.|\n)*ValueError: boom"):
        call(run_local_with_haste, torch_is_first, fork_and_wait, (tmp_path,), 2)
    kept, orphan = (int((tmp_path / name).read_text()) for name in ("kept", "orphan"))
    try:
        wait_until(lambda: has_ended(orphan))
        assert not has_ended(kept)
    finally:
        for pid in filter(psutil.pid_exists, (kept, orphan)):
            os.kill(pid, signal.SIGKILL)


def test_a_child_that_somebody_has_waited_for_has_no_exit_code() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert agent.exit_code(child.pid) is None


def test_a_result_that_cannot_be_sent_is_an_error_of_its_rank() -> None:
    with pytest.raises(WorkerError, match="pickle"):
        call(run_local, unpicklable, (), 1)


def test_a_worker_that_imports_its_launcher_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(SystemExit) as ended:
        train({})  # type: ignore[arg-type]
    assert ended.value.code == UNGUARDED_EXIT
    assert "shardwise.train: a worker imports the script" in capsys.readouterr().err


def test_gpu_workers_without_a_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(MachineError, match=r"shows no GPU; use parallel\.device=cpu"):
        run_local(everyone, ("",), 4, device_type="cuda")


LAUNCHER = """
import sys
from pathlib import Path
from shardwise.launch.local import run_local
from tests.launch.test_local import wait_for_ever
if __name__ == "__main__":
    run_local(wait_for_ever, (Path(sys.argv[1]), sys.argv[2] == "deaf"), 2)
"""


def wait_until(condition: Any, seconds: float = 200) -> None:
    """Fails only long after the condition should have come true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.05)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("deadly", "exit_code"),
    [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)],
)
def test_workers_die_with_their_launcher(tmp_path: Path, deadly: signal.Signals, exit_code: int) -> None:
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    ours, theirs = pty.openpty()
    notes = [tmp_path / "0", tmp_path / "1"]
    pids: list[int] = []
    words = tmp_path / "launcher.py", tmp_path, "deaf" if deadly == signal.SIGKILL else ""
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "TMPDIR": str(tmp_path)}
    try:
        with started(*words, cwd=ROOT, env=environment, terminal=os.ttyname(theirs)) as launcher:
            wait_until(lambda: launcher.poll() is not None or all(note.exists() for note in notes))
            assert launcher.poll() is None, os.read(ours, 10_000).decode()
            said = [note.read_text().split() for note in notes]
            pids = [int(pid) for pid, _ in said]
            assert [terminal for _, terminal in said] == ["True", "False"]  # rank 0 alone has the terminal
            launcher.send_signal(deadly)
            if deadly == signal.SIGINT:  # as a terminal does: every process of the group
                os.kill(pids[0], deadly)
            assert launcher.wait(timeout=100) == exit_code
            wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
            os.set_blocking(ours, False)
            with contextlib.suppress(BlockingIOError):
                assert b"atexit" not in os.read(ours, 100_000)
    finally:
        for pid in filter(psutil.pid_exists, pids):
            os.kill(pid, signal.SIGKILL)
        os.close(ours)
        os.close(theirs)


TORCHRUN_SCRIPT = """
import sys, torch, torch.distributed as dist
from shardwise.launch.environment import detect
from shardwise.launch.process_group import process_group
place = detect()
with process_group("cpu", "gloo", 60) as device:
    total = torch.ones(1, device=device)
    dist.all_reduce(total)
    sys.stdout.write(f"{place.launcher} {place.rank} {dist.get_rank()} {place.one_host} {total.item()}\\n")
"""


@pytest.mark.slow
def test_ranks_of_torchrun_join(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(TORCHRUN_SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, env=os.environ | {"TMPDIR": str(tmp_path)}
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["torchrun 0 0 True 2.0", "torchrun 1 1 True 2.0"]
