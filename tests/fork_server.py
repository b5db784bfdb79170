"""Scripts and commands in forks of one process that has imported torch, transformers and shardwise.

A fresh interpreter spends four seconds of processor time on those imports, and each local worker that it starts as
many. `run_python` takes the words that would follow `python` and gives the result that `subprocess.run` would: the fork
has its own directory, environment, arguments, module search path, standard streams and exit code. Local workers, which
the launcher spawns, are forks too, with the signal handlers and exit handlers of a new process. `call` runs a function
of a test module in such a fork.

The server is multiprocessing's, which worlds use too. It runs no parallel region and no backward, so that its forks
start as clean as it is. What needs a true process (imports that are left out, signals to a process group, a library
that reads its environment when it is loaded) is started with `subprocess` as ever.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import pickle
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping
from multiprocessing import context, process
from pathlib import Path
from types import ModuleType
from typing import Any

from shardwise.testing.world import PRELOAD

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
Completed = subprocess.CompletedProcess[str]


def run_python(
    *words: str | Path | int,
    cwd: Path | str | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 240,
) -> Completed:
    """Run `python *words` in a fork and return its exit code and what it wrote.

    Args:
        words: `-c CODE`, `-m MODULE` or the path of a script, and arguments.
        cwd: its working directory; None is this process's.
        env: its environment; None is this process's.
        timeout: seconds.

    Raises:
        subprocess.TimeoutExpired: it took longer; it has been killed.
    """
    arguments = [str(word) for word in words]
    environment = dict(os.environ if env is None else env)
    with tempfile.TemporaryDirectory(prefix="shardwise-fork-") as directory:
        out, err = Path(directory, "out"), Path(directory, "err")
        place = (os.path.abspath(cwd or os.getcwd()), environment, _site_path())
        code = _forked(_run_words, (arguments, *place, str(out), str(err)), arguments, timeout)
        # As the pipes of subprocess do it.
        said, complained = (file.read_bytes().decode().replace("\r\n", "\n") for file in (out, err))
    return Completed([sys.executable, *arguments], code, said, complained)


def call(function: Callable[..., Any], *args: Any, timeout: float = 240) -> Any:
    """Call a module-level `function(*args)` in a fork; return its result or raise its exception.

    Raises:
        AssertionError: the fork ended without a result.
        subprocess.TimeoutExpired: it took longer than `timeout` seconds; it has been killed.
    """
    with tempfile.TemporaryDirectory(prefix="shardwise-fork-") as directory:
        answer = Path(directory, "answer")
        request = (os.getcwd(), dict(os.environ), list(sys.path), str(answer), function.__module__)
        code = _forked(_run_call, (*request, function.__qualname__, pickle.dumps(args)), [function.__name__], timeout)
        assert answer.exists(), f"{function.__name__} ended with exit code {code}"
        is_error, result = pickle.loads(answer.read_bytes())
    if is_error:
        raise result
    return result


def _forked(target: Callable[..., None], args: tuple[Any, ...], words: list[str], timeout: float) -> int:
    """Start a fork, wait for its end and return its exit code."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(list(PRELOAD))
    fork = server.Process(target=target, args=args)
    fork.start()
    try:
        fork.join(timeout)
        if fork.exitcode is None:
            raise subprocess.TimeoutExpired(words, timeout)
        return fork.exitcode
    finally:
        fork.kill()
        fork.join()
        fork.close()


@functools.cache
def _site_path() -> list[str]:
    """Directories that every new interpreter searches, PYTHONPATH left out."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "COVERAGE_PROCESS_START")
    }
    code = "import sys; print(*sys.path[1:], sep='\\n')"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


# ---- in the fork


def _run_words(words: list[str], cwd: str, environment: dict[str, str], site: list[str], out: str, err: str) -> None:
    """Become the process `python *words`, and end as it would."""
    _redirect(out, err)
    _become_new_process(cwd, environment)
    given = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:] = [*given, *site]
    _exit(_exit_code(functools.partial(_run_main, words)))


def _run_call(
    cwd: str, environment: dict[str, str], path: list[str], answer: str, module: str, name: str, args: bytes
) -> None:
    _become_new_process(cwd, environment)
    sys.path[:] = path
    _exit(_exit_code(functools.partial(_answer, answer, module, name, args)))


def _answer(answer: str, module: str, name: str, args: bytes) -> None:
    try:
        function = functools.reduce(getattr, name.split("."), __import__(module, fromlist=["_"]))
        content = pickle.dumps((False, function(*pickle.loads(args))))
    except Exception as error:
        error.add_note("".join(traceback.format_exception(error)))
        content = pickle.dumps((True, error))
    Path(answer).write_bytes(content)


def _redirect(out: str, err: str) -> None:
    """Put standard input, output and error of this process where those of a piped command are."""
    for descriptor, path, flags in ((0, os.devnull, os.O_RDONLY), (1, out, os.O_WRONLY), (2, err, os.O_WRONLY)):
        file = os.open(path, flags | os.O_CREAT | os.O_APPEND if flags else flags, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False, encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", 1, closefd=False, encoding="utf-8", errors="backslashreplace")  # noqa: SIM115


def _become_new_process(cwd: str, environment: dict[str, str]) -> None:
    """Take on the directory and environment, and forget that this is somebody's worker."""
    os.chdir(cwd)
    threads = os.environ.get("OMP_NUM_THREADS")
    os.environ.clear()
    os.environ.update(environment)
    if environment.get("OMP_NUM_THREADS") != threads:  # which the library has read when it was loaded
        import torch

        torch.set_num_threads(int(environment.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))
    (main,) = (each for each in process.BaseProcess.__subclasses__() if each.__name__ == "_MainProcess")
    process._current_process = main()  # type: ignore[attr-defined]
    process._parent_process = None  # type: ignore[attr-defined]
    context._concrete_contexts["spawn"] = _ForkInstead()  # type: ignore[attr-defined]
    context._default_context.set_start_method(None, force=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _run_main(words: list[str]) -> None:
    """Run what `python *words` runs, as the module `__main__`."""
    first, *rest = words
    if first == "-m":
        sys.argv = ["-m", *rest[1:]]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = [first, *rest]
        sys.path.insert(0, str(Path(first).resolve().parent))
        runpy.run_path(first, run_name="__main__")


def _exit_code(body: Callable[[], None]) -> int:
    """Run `body`; print what it raises as the interpreter would, and return the exit code that the interpreter has."""
    try:
        body()
    except SystemExit as end:
        if isinstance(end.code, int):
            return end.code
        if end.code is not None:
            print(end.code, file=sys.stderr)
        return int(end.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _exit(code: int) -> None:
    """End this process: threads, exit handlers, buffers, in the interpreter's order."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


class _ForkedRank(context.ForkProcess):
    """A fork in the place of a spawned process: no signal handler and no exit handler of its parent's stays with it."""

    def _bootstrap(self, parent_sentinel: Any = None) -> int:
        atexit._clear()
        for number in SIGNALS:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        code: int = super()._bootstrap(parent_sentinel)  # type: ignore[misc]
        atexit._run_exitfuncs()
        return code


class _ForkInstead(context.ForkContext):
    Process = _ForkedRank  # type: ignore[assignment]
