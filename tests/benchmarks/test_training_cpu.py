"""The CPU benchmark at toy size: its arithmetic, its checks, and one real run of shardwise beside bare FSDP2."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from benchmarks import training_cpu
from benchmarks.harness import Contender, Series
from benchmarks.peers import DEEPSPEED, FSDP2
from benchmarks.workload import Workload, load_model, product_rate, save_model, token_ids
from tests.fork_server import call

TOY = ["--layers", "2", "--width", "32", "--heads", "2", "--vocabulary", "128", "--sequence", "16", "--batch", "2"]
PEERS = [name for name in ("deepspeed", "accelerate") if importlib.util.find_spec(name)]


def test_flops_follow_the_model(tmp_path: Path) -> None:
    workload = Workload(layers=3, width=32, heads=2, vocabulary=128, sequence=16)
    save_model(workload, tmp_path)
    model = load_model(tmp_path)
    parameters = sum(parameter.numel() for parameter in model.parameters()) - 16 * 32  # without positions
    assert workload.flops_per_token == 6 * parameters + 12 * 3 * 16 * 32
    products = sum(count * 2 * m * k * n for (m, k, n), count in workload.products(rows=1))
    matrices = sum(p.numel() for p in model.parameters() if p.ndim == 2) - 16 * 32
    assert products == 2 * matrices


def test_the_same_batch_for_everyone_and_another_for_each_rank() -> None:
    workload = Workload()
    assert torch.equal(token_ids(workload, 1), token_ids(workload, 1))
    assert not torch.equal(token_ids(workload, 0), token_ids(workload, 1))


def test_product_rate_leaves_the_threads_alone() -> None:
    before = torch.get_num_threads()
    assert product_rate(Workload(width=32, vocabulary=64), rows=16, threads=1, repeats=1) > 0
    assert torch.get_num_threads() == before


def series(contender: Contender, seconds: list[float], first: float = 5.0, later: float = 4.0, **more: Any) -> Series:
    return Series(contender, seconds, [1.0] * len(seconds), [first, later, 3.0, 2.0], **more)


def summarized(*entries: Series) -> dict[str, Any]:
    return training_cpu.summarize_run(list(entries), Workload(), ranks=2, steps=2, warmup=2, limit=1e12)


def test_table_of_a_run() -> None:
    run = summarized(
        series(training_cpu.SHARDWISE, [1.0, 2.0, 4.0]),
        series(FSDP2, [1.1, 2.2, 4.4]),
        Series(DEEPSPEED, skipped="deepspeed is not installed"),
    )
    ours, theirs, skipped = run["rows"]
    assert ours["tokens_per_second"]["median"] == 2 * 2 * 1024 / 2.0
    assert ours["share_of_limit"] == 2048 * Workload().flops_per_token / 1e12
    assert theirs["shardwise_ratio"]["median"] == pytest.approx(1.1)
    assert theirs["loss_after_warmup"] == 4.0
    assert skipped["skipped"] == "deepspeed is not installed"
    assert training_cpu.check(run) == []  # a peer that is not installed is no problem of the run
    console = Console(width=130)
    with console.capture() as capture:
        console.print(training_cpu.render(run))
    text = capture.get()
    assert "1.100 (1.100 1.100)" in text and "skipped: deepspeed is not installed" in text


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        (series(FSDP2, [1.0], first=5.001), "first_loss disagrees"),
        (series(FSDP2, [1.0], first=float("nan")), "first_loss disagrees"),
        (series(FSDP2, [1.0], later=4.1), "loss_after_warmup disagrees"),
        (series(FSDP2, [1.0], idle_cpu_seconds=5.0, idle_seconds=10.0), "FSDP2 used 0.50 cores while waiting"),
        (Series(FSDP2, skipped="it broke"), "FSDP2 did not run: it broke"),
    ],
)
def test_a_run_that_proves_nothing_says_so(entry: Series, problem: str) -> None:
    problems = training_cpu.check(summarized(series(training_cpu.SHARDWISE, [1.0]), entry))
    assert len(problems) == 1 and problem in problems[0]


def run(tmp_path: Path, *contenders: str) -> dict[str, Any]:
    path = tmp_path / "result.json"
    options = ["--ranks", "2", "--rounds", "2", "--steps", "1", "--warmup", "3", "--json", str(path)]
    code = call(training_cpu.main, [*TOY, *options, "--contenders", *contenders], timeout=1800)
    content: dict[str, Any] = json.loads(path.read_text())
    assert code == 0, content["problems"]
    return content


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_shardwise_beside_fsdp2(tmp_path: Path) -> None:
    rows = run(tmp_path, "shardwise", "engine", "fsdp2")["runs"][0]["rows"]
    assert [row["contender"] for row in rows] == ["shardwise", "shardwise, engine", "FSDP2"]
    ours, on_engine, theirs = rows
    assert on_engine["last_loss"] == pytest.approx(ours["last_loss"], abs=1e-5)
    assert theirs["engine_ratio"]["median"] > 0
    assert ours["first_loss"] == pytest.approx(theirs["first_loss"], abs=1e-5)
    assert ours["last_loss"] == pytest.approx(theirs["last_loss"], abs=1e-4)
    assert ours["last_loss"] < ours["first_loss"]


@pytest.mark.slow
@pytest.mark.timeout(1800)  # DeepSpeed compiles its kernels on first use
@pytest.mark.skipif(not PEERS, reason="the extra bench-peers is not installed")
def test_the_other_peers(tmp_path: Path) -> None:
    rows = run(tmp_path, "shardwise", "fsdp2", *PEERS)["runs"][0]["rows"]
    assert not [row for row in rows if "skipped" in row]
