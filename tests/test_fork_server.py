"""Scripts in forks behave as in an interpreter of their own, and start in a process without threads or engine."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.errors import LegalityError
from tests.fork_server import call, run_python, started

SCRIPT = """
import atexit, os, sys
atexit.register(lambda: print("at exit"))
print(__name__, sys.argv[1:], os.getcwd(), os.environ["GIVEN"], sys.path[0], sys.stdin.read() == "")
print("to the other stream", file=sys.stderr)
if sys.argv[1] == "raise":
    raise ValueError("of the script")
if sys.argv[1] == "interrupt":
    raise KeyboardInterrupt
if sys.argv[1] == "kill":
    sys.stdout.flush()
    os.kill(os.getpid(), 9)
sys.exit({"text": "last words", "number": 7}.get(sys.argv[1]))
"""


@pytest.mark.parametrize("how", ["none", "text", "number", "raise", "interrupt", "kill"])
def test_a_script_ends_as_in_an_interpreter_of_its_own(tmp_path: Path, how: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "GIVEN": "here", "TMPDIR": str(tmp_path)}
    fork = run_python(script, how, cwd=tmp_path, env=environment)
    command = [sys.executable, str(script), how]
    true = subprocess.run(
        command, cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert (fork.args, fork.returncode, fork.stdout) == (command, true.returncode, true.stdout)
    assert fork.stderr.splitlines()[0] == true.stderr.splitlines()[0]
    assert fork.stderr.splitlines()[-1] == true.stderr.splitlines()[-1]


def test_code_and_modules_run_too(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import sys; print(__name__, sys.argv[1:])")
    assert run_python("-m", "mine", "a", 1, cwd=tmp_path).stdout == "__main__ ['a', '1']\n"
    assert run_python("-c", "import sys; print(sys.argv, __name__)", "a").stdout == "['-c', 'a'] __main__\n"


CLEAN = """
import sys, threading, torch
from torch.autograd.variable import Variable
assert threading.active_count() == 1, threading.enumerate()
assert not torch.distributed.is_initialized()
maps = open("/proc/self/maps").read()
assert "libtorch" in maps and "shardwise/engine" not in maps
torch.ones(2, requires_grad=True).sum().backward()
print(torch.get_num_threads(), multiprocessing.parent_process(), multiprocessing.get_start_method())
"""


def test_a_fork_is_as_clean_as_a_new_process() -> None:
    code = "import multiprocessing\n" + CLEAN
    done = run_python("-c", code, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert (done.returncode, done.stdout) == (0, "1 None fork\n"), done.stderr


def test_a_fork_that_takes_too_long_is_killed() -> None:
    with started("-c", "import time; time.sleep(600)") as fork:
        with pytest.raises(subprocess.TimeoutExpired):
            fork.communicate(timeout=1)
        assert fork.returncode == -signal.SIGKILL


def legality(fails: bool) -> int:
    print("said by the fork", flush=True)
    if fails:
        raise LegalityError("no", rule="tensor")
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=os._exit, args=(5,))
    process.start()
    process.join()
    return process.exitcode or 0


def test_a_call_returns_or_raises_and_writes(capfd: pytest.CaptureFixture[str]) -> None:
    assert call(legality, False) == 5
    with pytest.raises(LegalityError, match=r"^no$"):
        call(legality, fails=True)
    assert capfd.readouterr().out == "said by the fork\n" * 2
