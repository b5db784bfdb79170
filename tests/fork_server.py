"""Scripts and commands in forks of one process that has imported torch, transformers and shardwise.

A fresh interpreter spends four seconds of processor time on those imports, and each local worker that it starts as
many. `run_python` takes the words that would follow `python` and gives the result that `subprocess.run` would: the fork
has its own directory, environment, arguments, module search path, standard streams and exit code. Local workers, which
the launcher spawns, are forks too where they can be, with the signal handlers and exit handlers of a new process.
`started` does not wait for the end; `call` runs a function in such a fork.

The server is multiprocessing's, which worlds use too; conftest.py says what it imports. It runs no parallel region and
no backward, so that its forks start as clean as it is. What needs a true process (imports that are left out, signals to
a process group, a library that reads its environment when it is loaded) is started with `subprocess` as ever.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import context, process
from pathlib import Path
from types import ModuleType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)


class Fork:
    """A process of the fork server, with the names that `subprocess.Popen` has for what can be done to it."""

    def __init__(self, target: Callable[..., None], *args: Any) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="shardwise-fork-")
        self._outputs = tuple(os.path.join(self._directory.name, name) for name in ("out", "err"))
        self._process = multiprocessing.get_context("forkserver").Process(target=target, args=(*args, self._outputs))
        self._process.start()
        self.pid: int = self._process.pid or 0

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout: float = 240) -> int:
        """Return the exit code; a process that takes longer is killed, and subprocess.TimeoutExpired raised."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            self.end()
            raise subprocess.TimeoutExpired(str(self._process), timeout)
        return self._process.exitcode

    def communicate(self, timeout: float = 240) -> tuple[str, str]:
        """Wait for the end and return what was written to standard output and to standard error."""
        self.wait(timeout)
        said, complained = (Path(path).read_text() if os.path.exists(path) else "" for path in self._outputs)
        return said, complained

    def end(self) -> None:
        """Kill what still runs and remove what was written."""
        self._process.kill()
        self._process.join()
        self._directory.cleanup()


@contextmanager
def started(
    *words: str | Path | int,
    cwd: Path | str | None = None,
    env: Mapping[str, str] | None = None,
    terminal: str | None = None,
    new_session: bool = False,
) -> Iterator[Fork]:
    """Start `python *words` in a fork, and end it when the block is left.

    Args:
        words: `-c CODE`, `-m MODULE` or the path of a script, and arguments.
        cwd: its working directory; None is this process's.
        env: its environment; None is this process's.
        terminal: the path of a terminal for its three standard streams; None has them captured.
        new_session: whether it leads a session and a process group of its own.
    """
    surroundings = os.path.abspath(cwd or os.getcwd()), dict(os.environ if env is None else env), _site_path()
    fork = Fork(_run_words, [str(word) for word in words], *surroundings, terminal, new_session)
    try:
        yield fork
    finally:
        fork.end()


def run_python(
    *words: str | Path | int,
    cwd: Path | str | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 240,
) -> subprocess.CompletedProcess[str]:
    """Run `python *words` in a fork and return its exit code and what it wrote, as `subprocess.run` does.

    Raises:
        subprocess.TimeoutExpired: it took longer than `timeout` seconds; it has been killed.
    """
    with started(*words, cwd=cwd, env=env) as fork:
        said, complained = fork.communicate(timeout)
        return subprocess.CompletedProcess([sys.executable, *map(str, words)], fork.wait(), said, complained)


def call(function: Callable[..., Any], *args: Any, timeout: float = 240, **settings: Any) -> Any:
    """Call an importable `function` in a fork; return its result or raise its exception, and write what it wrote.

    Raises:
        AssertionError: the fork ended without a result.
        subprocess.TimeoutExpired: it took longer than `timeout` seconds; it has been killed.
    """
    request = (
        os.getcwd(),
        dict(os.environ),
        list(sys.path),
        function.__module__,
        pickle.dumps((function, args, settings)),
    )
    fork = Fork(_run_call, *request)
    try:
        for descriptor, text in zip((1, 2), fork.communicate(timeout), strict=True):
            os.write(descriptor, text.encode())
        answer = Path(fork._outputs[0]).with_name("answer")
        assert answer.exists(), f"{function.__name__} ended with exit code {fork.returncode}"
        error, content = pickle.loads(answer.read_bytes())
    finally:
        fork.end()
    if error is not None:
        raise error from RuntimeError(f"in a fork:\n{content}")
    return content


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


Outputs = tuple[str, str]  # files for standard output and standard error


def _run_words(
    words: list[str],
    cwd: str,
    environment: dict[str, str],
    site: list[str],
    terminal: str | None,
    new_session: bool,
    outputs: Outputs,
) -> None:
    """Become the process `python *words`, and end as it would."""
    if new_session:
        os.setsid()
    _redirect(*((terminal, terminal, terminal) if terminal else (os.devnull, *outputs)))
    _become_new_process(cwd, environment)
    given = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:] = [*given, *site]
    _exit(_exit_code(functools.partial(_run_main, words)))


def _run_call(
    cwd: str, environment: dict[str, str], path: list[str], module: str, request: bytes, outputs: Outputs
) -> None:
    _redirect(os.devnull, *outputs)
    _become_new_process(cwd, environment)
    sys.path[:] = path
    _exit(_exit_code(functools.partial(_answer, Path(outputs[0]).with_name("answer"), module, request)))


def _answer(answer: Path, module: str, request: bytes) -> None:
    """Leave the result or the exception of the call in the file `answer`."""
    try:
        importlib.import_module(module)
        function, args, settings = pickle.loads(request)
        content = pickle.dumps((None, function(*args, **settings)))
    except Exception as error:
        content = pickle.dumps((error, "".join(traceback.format_exception(error))))
    answer.write_bytes(content)


def _redirect(inputs: str, out: str, err: str) -> None:
    """Open this process's standard streams anew."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    for descriptor, path, how in ((0, inputs, os.O_RDONLY), (1, out, flags), (2, err, flags)):
        file = os.open(path, how, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False, encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(  # noqa: SIM115
        2, "w", 1, closefd=False, encoding="utf-8", errors="backslashreplace"
    )


def _become_new_process(cwd: str, environment: dict[str, str]) -> None:
    """Take on the directory and environment, and forget that this is somebody's worker."""
    os.chdir(cwd)
    threads = os.environ.get("OMP_NUM_THREADS")
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # of another TMPDIR
    if environment.get("OMP_NUM_THREADS") != threads:  # which the library has read when it was loaded
        import torch

        torch.set_num_threads(int(environment.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))
    (main,) = (each for each in process.BaseProcess.__subclasses__() if each.__name__ == "_MainProcess")
    process._current_process = main()  # type: ignore[attr-defined]
    process._parent_process = None  # type: ignore[attr-defined]
    context._concrete_contexts = _Contexts(context._concrete_contexts)  # type: ignore[attr-defined]
    process.ORIGINAL_DIR = cwd  # type: ignore[attr-defined]  # from which a spawned process finds the script
    context._default_context.set_start_method(None, force=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if started := getattr(getattr(sys.modules.get("coverage"), "process_startup", None), "coverage", None):
        atexit.unregister(started._atexit)  # of the server's own measurement; each fork has another


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
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _exit(code: int) -> None:
    """End this process: threads, exit handlers, buffers, in the interpreter's order."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if code < 0:  # the interpreter ends as the signal would have ended it
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


class _ForkedRank(context.ForkProcess):
    """A fork in the place of a spawned process: no signal handler and no exit handler of its parent's stays with it."""

    def start(self) -> None:
        gc.disable()  # until what the parent has made is frozen: in a fork its stores have no threads
        try:
            super().start()
        finally:
            gc.enable()

    def _bootstrap(self, parent_sentinel: Any = None) -> int:
        atexit._clear()
        gc.freeze()
        gc.enable()
        begin_threads()
        for number in SIGNALS:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        code: int = super()._bootstrap(parent_sentinel)  # type: ignore[misc]
        atexit._run_exitfuncs()
        return code


class _ForkInstead(context.ForkContext):
    Process = _ForkedRank  # type: ignore[assignment]


class _Contexts(dict[str, context.BaseContext]):
    """multiprocessing's contexts, where `spawn` gives forks until this process has threads of autograd.

    Torch starts them in its first backward where it knows of devices, fake ones included; a fork would lack them.
    """

    def __getitem__(self, method: str) -> context.BaseContext:
        if method == "spawn" and "pt_autograd_0" not in _threads():
            return _ForkInstead()
        return super().__getitem__(method)


def _threads() -> set[str]:
    """Return the names that this process's threads have for the kernel."""
    return {path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")}


def begin_threads() -> None:
    """Make torch's pool of threads now, by one thread: a fork's are made anew, and not by several at once."""
    import torch  # where it is needed

    torch.set_num_threads(torch.get_num_threads())
