"""The native engine: building it once, loading it, and making the c10d backend of a group.

The sources (`native/`, C++17) are compiled
on first use with torch's own extension builder; the library is kept in the user's cache under a name that says what it
was built from and for: the sources, torch, Python and the processor's level. Nothing here runs on `import shardwise`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import cache
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from filelock import FileLock

from shardwise.cache import cache_root
from shardwise.collectives.names import tell_names_to
from shardwise.collectives.topology import discover_topology
from shardwise.errors import MachineError

DIRECTORY_VARIABLE = "SHARDWISE_ENGINE_DIRECTORY"
INTERFACE_VARIABLE = "SHARDWISE_SOCKET_IFNAME"
SOURCES = Path(__file__).with_name("native")
MODULE = "_shardwise_engine"
OPTIMIZED = ["-O3", "-ffp-contract=off", "-fno-trapping-math"]  # each operation rounds, on every processor alike

Say = Callable[[str], None]


def directory() -> Path:
    """Return the directory of built engines: `$SHARDWISE_ENGINE_DIRECTORY`, else `engine` in the user's cache."""
    given = os.environ.get(DIRECTORY_VARIABLE)
    return Path(given).expanduser().absolute() if given else cache_root() / "engine"


def library() -> Path:
    """Return the file of the engine of these sources, for this torch, Python and processor; it may not exist yet."""
    return directory() / _key() / f"{MODULE}.so"


def obstacle() -> str:
    """Return why the engine cannot run here, as far as is known without building it; empty where it can."""
    if sys.platform != "linux":
        return f"it needs Linux, this is {sys.platform}"
    if library().is_file():
        try:
            return load_engine().obstacle()
        except MachineError as error:
            return str(error)
    compiler = os.environ.get("CXX") or "c++"
    if shutil.which(compiler) is None:
        return f"it is not built yet and there is no C++ compiler ({compiler}); install one or set CXX"
    return ""


def build(say: Say = print) -> Path:
    """Compile the engine unless it is there; other processes of this host wait meanwhile.

    Raises:
        MachineError: there is no compiler, it fails, or the cache cannot be written.
    """
    path = library()
    if path.is_file():
        return path
    problem = obstacle()
    if problem:
        raise MachineError(f"the native engine cannot be used: {problem}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)  # what lies there is run
        with FileLock(f"{path}.lock"):
            if not path.is_file():
                _compile(path, say)
    except OSError as error:
        raise MachineError(
            f"the native engine cannot be kept in {path.parent}: {error}; set {DIRECTORY_VARIABLE} to a directory that "
            "can be written, or parallel.ddp_dist_backend to gloo"
        ) from error
    return path


@cache
def load_engine() -> ModuleType:
    """Return the engine's extension module; build it if needed.

    Raises:
        MachineError: as `build`.
    """
    spec = importlib.util.spec_from_file_location(MODULE, build())
    if spec is None or spec.loader is None:
        raise MachineError(f"the native engine {library()} is no Python extension; remove it, and it is built again")
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except (ImportError, OSError) as error:  # cut short, or where nothing may be executed
        raise MachineError(f"the native engine {library()} cannot be loaded: {error}; remove it, or set "
                           f"{DIRECTORY_VARIABLE} to a directory whose files may be executed") from error  # fmt: skip
    tell_names_to(module.set_label)
    return module


def tell_failure(text: str) -> None:
    """Tell the other ranks of all groups on the engine that this process has failed; those that wait for it stop."""
    if load_engine.cache_info().currsize:
        load_engine().tell_failure(text)


def leave_groups(seconds: float) -> None:
    """End this process's part in all groups on the engine, as its interpreter does; what is under way has `seconds`."""
    if load_engine.cache_info().currsize:
        load_engine().leave_all(seconds)


def create(store: Any, rank: int, names: Sequence[int], timeout: timedelta) -> Any:
    """The backend of one rank of a group, from a store that its members alone see; `names` are its global ranks."""
    store = _fresh(store, rank)
    hosts = discover_topology(store, rank, len(names)).hosts
    interface = os.environ.get(INTERFACE_VARIABLE, "")
    return load_engine().make(store, rank, hosts, list(names), interface, *_towards(store), timeout)


def _fresh(store: Any, rank: int) -> Any:
    """Return the store without what an earlier group has left: torch names a group as one that was destroyed."""
    times = store.add(f"made by {rank}", 1)
    return store if times == 1 else dist.PrefixStore(f"made {times}", store)


def _towards(store: Any) -> tuple[str, str]:
    """Host and port of the group's store, or the job's own where the store is none of the network."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if hasattr(store, "host"):
        return store.host, str(store.port)
    return os.environ.get("MASTER_ADDR") or socket.gethostname(), os.environ.get("MASTER_PORT") or "0"


def _compile(path: Path, say: Say) -> None:
    from torch.utils import cpp_extension

    say(f"compiling the native engine for torch {torch.__version__}, once (about a minute)")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="building-", dir=path.parent) as where, _ninja_found():
        try:
            cpp_extension.load(
                MODULE,
                [str(source) for source in _sources("*.cpp") if source.name != "stress.cpp"],
                extra_cflags=[*OPTIMIZED, *_level()],
                extra_ldflags=[*_cxx_library()],
                build_directory=where,
                is_python_module=False,
                is_standalone=False,
            )
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            raise MachineError(
                f"the native engine could not be compiled: {_first_complaint(str(error), path.parent)}; "
                "set parallel.ddp_dist_backend to gloo to go without"
            ) from error
        with open(Path(where) / path.name, "rb") as made:
            os.fsync(made.fileno())
        os.replace(Path(where) / path.name, path)  # whole or not at all
    say(f"compiled in {time.monotonic() - began:.0f} s: {path}")


def _first_complaint(output: str, directory: Path) -> str:
    """The first error in a compiler's output, one line of hundreds, and where all of it is kept."""
    log = directory / "compile.log"
    log.write_text(output)
    lines = output.strip().splitlines() or ["no word of why"]
    return f"{next((line for line in lines if 'error:' in line), lines[-1]).strip()} (all of it: {log})"


@contextlib.contextmanager
def _ninja_found() -> Iterator[None]:
    """The `ninja` package's program is beside Python's own, which need not be on PATH."""
    before = os.environ.get("PATH", "")
    os.environ["PATH"] = os.pathsep.join((before, str(Path(sys.executable).parent)))
    try:
        yield
    finally:
        os.environ["PATH"] = before


def _sources(pattern: str) -> list[Path]:
    return sorted(SOURCES.glob(pattern))


@cache
def _key() -> str:
    parts = [torch.__version__, sys.version, platform.machine(), *OPTIMIZED, *_level(), *_cxx_library()]
    parts += [source.name + source.read_text() for source in (*_sources("*.cpp"), *_sources("*.h"))]
    return blake2b("\0".join(parts).encode(), digest_size=12).hexdigest()


@cache
def _level() -> tuple[str, ...]:
    """The instructions to compile for: AVX2 and its companions where the processor has them. NEON is always there."""
    if platform.machine() != "x86_64":
        return ()
    flags = Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split()
    return ("-march=x86-64-v3",) if {"avx2", "fma", "bmi2", "f16c"} <= set(flags) else ()


@cache
def _cxx_library() -> tuple[str, ...]:
    """The C++ library that torch has loaded. Some compilers link a static one, and a process with two crashes."""
    paths = (line.split(maxsplit=5)[-1].rstrip() for line in Path("/proc/self/maps").read_text().splitlines())
    return tuple(dict.fromkeys(path for path in paths if Path(path).name.startswith("libstdc++.so.")))
