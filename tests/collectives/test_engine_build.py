"""Building, finding and going without the engine; its standalone stress under the sanitizers; its benchmark."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from shardwise.collectives import engine
from shardwise.commands import bench
from shardwise.commands import train as entry
from shardwise.commands.cli import main
from shardwise.errors import MachineError
from shardwise.job.schema import Job
from shardwise.launch import process_group
from shardwise.launch.environment import RankEnvironment
from shardwise.launch.expected_world import engine_problem, may_use_engine
from shardwise.launch.job_group import usable_backend
from shardwise.plan.plan import World
from shardwise.testing.world import WorldPool


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing built and nothing to build with."""
    monkeypatch.setenv(engine.DIRECTORY_VARIABLE, str(tmp_path / "engine"))
    monkeypatch.setenv("CXX", "no-such-compiler")


def job(backend: str = "auto", workers: int = 2) -> Job:
    return Job.model_validate({"parallel": {"ddp_dist_backend": backend, "workers": workers, "device": "cpu"}})


def backend(job: Job) -> str:
    return entry.plan_job(job).backend


def test_auto_takes_the_engine_and_gloo_for_one_rank() -> None:
    assert engine.obstacle() == ""
    assert (backend(job()), backend(job(workers=1)), backend(job("gloo"))) == ("shardwise", "gloo", "gloo")
    assert may_use_engine(job(), World(4, "cpu", 2, hosts=2)) is True


def test_without_a_compiler_auto_is_gloo_with_one_line(no_compiler: None) -> None:
    plan = entry.plan_job(job())
    assert plan.backend == "gloo"
    assert [note for note in plan.notes if "Gloo" in note] == [
        "the ranks talk over Gloo, the native engine is not usable: it is not built yet and there is no C++ compiler "
        "(no-such-compiler); install one or set CXX."
    ]


def test_an_engine_that_cannot_be_loaded_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(engine.DIRECTORY_VARIABLE, str(tmp_path / "engine"))
    monkeypatch.setattr(engine, "load_engine", engine.load_engine.__wrapped__)  # another one may be in this process
    engine.library().parent.mkdir(parents=True)
    engine.library().touch()  # as a power failure leaves it
    plan = entry.plan_job(job())
    assert plan.backend == "gloo"
    [note] = [note for note in plan.notes if "Gloo" in note]
    assert f"{engine.library()} cannot be loaded" in note and "remove it" in note


def test_on_several_hosts_all_take_gloo_where_one_has_no_compiler(
    no_compiler: None, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = entry.plan_job(job())
    assert engine_problem(job(), World(4, "cpu", 2, hosts=2)) == ""
    several = replace(plan, world=World(4, "cpu", 2, hosts=2), backend="shardwise")
    here = usable_backend(several, print)
    assert here == "measured_gloo_gloo"  # what two hosts of two ranks take without the engine
    store = dist.HashStore()
    places = [RankEnvironment(rank, 4, rank % 2, 2, "", 1, "torchrun") for rank in range(4)]
    names = ["shardwise", "shardwise", here, here]
    with ThreadPoolExecutor(4) as pool:
        agreed = [*pool.map(lambda place, name: process_group.agree(store, place, name, "cpu"), places, names)]
    assert agreed == [here] * 4
    said = capsys.readouterr()
    assert "note: the ranks talk over Gloo. the native engine cannot be used" in said.out
    assert said.err == (
        "note: the ranks talk over Gloo: rank 2 cannot use the native engine; `shardwise build` on its host says why.\n"
    )


def test_ranks_that_ask_for_different_backends_are_told() -> None:
    store = dist.HashStore()
    store.set("backend/1", "gloo")
    store.set("backend/2", "measured_gloo_gloo")
    with pytest.raises(MachineError, match="different backends: shardwise, gloo, measured_gloo_gloo; give all"):
        process_group.agree(store, RankEnvironment(0, 3, 0, 1, "", 1, "torchrun"), "shardwise", "cpu")


def test_asked_for_without_a_compiler_it_is_an_error(no_compiler: None, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(MachineError, match="no C\\+\\+ compiler"):
        usable_backend(entry.plan_job(job("shardwise")), print)
    assert main(["build"]) == 2
    assert "no C++ compiler (no-such-compiler); install one or set CXX" in " ".join(capsys.readouterr().err.split())


def test_a_compiler_that_fails_leaves_gloo_and_its_words_in_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = tmp_path / "c++"
    fails = 'case " $* " in *" -c "*) echo x.cpp:1: error: the disk is on fire >&2; echo and so on >&2; exit 1;; esac'
    compiler.write_text(f'#!/bin/sh\n{fails}\nexec c++ "$@"\n')
    compiler.chmod(0o755)
    plan = entry.plan_job(job())
    monkeypatch.setenv(engine.DIRECTORY_VARIABLE, str(tmp_path / "engine"))
    monkeypatch.setenv("CXX", str(compiler))
    said: list[str] = []
    assert usable_backend(plan, said.append) == "gloo"
    assert said[-1].startswith("note: the ranks talk over Gloo. the native engine could not be compiled")
    assert "x.cpp:1: error: the disk is on fire (all of it: " in said[-1] and "\n" not in said[-1]
    [log] = [path for path in (tmp_path / "engine").rglob("*") if path.is_file() and path.suffix != ".lock"]
    assert str(log) in said[-1] and "and so on" in log.read_text()


def test_importing_shardwise_neither_loads_nor_registers_the_engine() -> None:
    code = "import shardwise, sys; assert not {'shardwise.collectives.engine', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})


def test_the_sources_are_in_the_package() -> None:
    names = {path.name for path in engine.SOURCES.iterdir()}
    assert {"backend.cpp", "group.cpp", "group.h", "stress.cpp"} <= names


def build_stress(directory: Path, *flags: str) -> Path:
    sources = [path for path in engine.SOURCES.glob("*.cpp") if path.name != "backend.cpp"]
    program = directory / "stress"
    subprocess.run(["c++", "-std=c++17", "-pthread", *flags, *map(str, sources), "-o", str(program)], check=True)
    return program


@pytest.mark.slow  # it compiles the engine
@pytest.mark.skipif(sys.platform != "linux", reason="reads an ELF file")
def test_a_compiler_that_links_its_own_cxx_library_gives_an_engine_with_torchs(tmp_path: Path) -> None:
    """A process with two of them dies by SIGSEGV where the engine writes a number into a stream."""
    compiler, directory = tmp_path / "static-c++", tmp_path / "engine"
    compiler.write_text('#!/bin/sh\nexec c++ -static-libstdc++ "$@"\n')
    compiler.chmod(0o755)
    environment = {**os.environ, "CXX": str(compiler), engine.DIRECTORY_VARIABLE: str(directory)}
    subprocess.run([sys.executable, "-m", "shardwise", "build"], check=True, env=environment, timeout=280)
    [built] = directory.rglob("*.so")
    needs = subprocess.run(["readelf", "-d", built], check=True, capture_output=True, text=True).stdout
    assert "[libstdc++.so.6]" in needs


@pytest.mark.slow  # it compiles the engine's sources once more
def test_nobody_is_left_asleep_when_what_it_waits_for_has_come(tmp_path: Path) -> None:
    """Sleepers look around every 20 s here, not every 0.1 s: two that nobody woke take longer than all are given.

    One is let go: where a rank of the host breaks the group, the others may learn of it by looking around.
    """
    program = build_stress(tmp_path, "-O0", "-DSHARDWISE_LOOK_AROUND_SECONDS=20")
    for ranks, hosts in ((5, 1), (4, 2), (5, 2), (7, 4)):
        command = [program, str(ranks), "60", "7", str(hosts)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


@pytest.fixture(scope="module", params=["thread", "address,undefined"])
def stress(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The standalone stress, built for a sanitizer; once for all its runs, each of which has a test's time."""
    flags = ("-O1", "-g", f"-fsanitize={request.param}", "-fno-sanitize-recover=all")
    return build_stress(tmp_path_factory.mktemp("stress"), *flags)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "hosts"), [(2, 1), (5, 1), (4, 2), (5, 2), (3, 3), (7, 4)])
def test_sanitizers_have_nothing_to_report(stress: Path, ranks: int, hosts: int) -> None:
    command = [stress, str(ranks), "150", "7", str(hosts)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=290)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


def test_benchmark_writes_its_rows(
    world_pool: WorldPool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "WorldPool", lambda **settings: contextlib.nullcontext(world_pool))
    dtypes = ("float32", "bfloat16", "float32")
    cases = [
        bench.Case(operation, 2, 1 << 16, dtype) for operation, dtype in zip(bench.OPERATIONS, dtypes, strict=True)
    ]
    assert bench.run_collectives(str(tmp_path / "rows.json"), cases) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["operation"] for row in rows] == list(bench.OPERATIONS)
    for row in rows:
        assert set(row["seconds"]) == {"shardwise", "gloo"} and min(row["seconds"].values()) > 0
        assert row["ratio_to_gloo"] > 0 and row["share_of_copy_limit"] > 0
        assert (row["ranks"], row["bytes"]) == (2, 1 << 16)
    assert "reduce_scatter" in capsys.readouterr().out


def test_benchmark_refuses_a_file_it_cannot_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "collectives", "--json", str(tmp_path / "no" / "rows.json")]) == 2
    assert "cannot be written" in capsys.readouterr().err
