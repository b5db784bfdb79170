"""Two hosts of a scheduler on this machine: a process each, with the variables of TrainJob, that starts its ranks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors.exit_codes import FAULT, MISTAKE

KEYS = [
    "--model.config", '{"model_type": "gpt2", "n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 32}',
    "--training.steps", "2", "--training.sequences_per_step", "8", "--training.evaluate_batches", "1",
    "--data.sequence_length", "16", "--data.vocabulary_size", "300", "--observe.tensorboard", "false",
    "--observe.sample", "false", "--parallel.device", "cpu", "--precision.compute", "fp64",
]  # fmt: skip


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run_hosts(directory: Path, count: int, processes: int, *words: str, **of_last: str) -> list[tuple[int, str]]:
    """Run `shardwise` on so many hosts; exit code and output of each. `of_last` are variables of the last host."""
    port, started = str(free_port()), []
    for index in range(count):
        variables = {
            "PET_NNODES": str(count),
            "PET_NODE_RANK": str(index),
            "PET_NPROC_PER_NODE": str(processes),
            "PET_MASTER_ADDR": "127.0.0.1",
            "PET_MASTER_PORT": port,
            "SHARDWISE_HOST": f"host-{index}",
            # As PyTorchJob sets them, for the pod:
            "RANK": str(index),
            "WORLD_SIZE": str(count * processes),
        }
        host = directory / f"host-{index}"
        host.mkdir(exist_ok=True)
        more: dict[str, Any] = of_last if index == count - 1 else {}
        environment = os.environ | variables | more
        command = [sys.executable, "-m", "shardwise", *words]
        started.append(
            subprocess.Popen(
                command, cwd=host, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    try:
        outputs = [process.communicate(timeout=240)[0] for process in started]
        return [(process.returncode, output) for process, output in zip(started, outputs)]
    finally:
        for process in started:
            process.kill()
            process.wait()


def losses(output: Path) -> list[float]:
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if "loss" in record]


@pytest.mark.slow  # six processes import torch
def test_two_hosts_train_as_one_does(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("all work and no play makes jack a dull boy\n" * 300)
    keys = [*KEYS, "--data.path", str(corpus)]
    ended = run_hosts(tmp_path, 2, 2, "train", *keys, "--output", str(tmp_path / "two"))
    assert [code for code, _ in ended] == [0, 0], ended
    alone = run_hosts(tmp_path, 1, 1, "train", *keys, "--output", str(tmp_path / "one"))
    assert alone[0][0] == 0, alone
    assert "4 cpu ranks" in ended[0][1] and "step 2/2" not in ended[1][1]  # rank 0 alone speaks
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-9)


FAILING = "import os, sys, time\nif os.environ['RANK'] == '3':\n    raise RuntimeError('of rank 3')\ntime.sleep(600)\n"


@pytest.mark.slow
def test_a_failure_on_one_host_ends_all_with_its_words(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(FAILING)
    ended = run_hosts(tmp_path, 2, 2, "run", "--device", "cpu", str(tmp_path / "script.py"))
    assert [code for code, _ in ended] == [FAULT, FAULT]
    assert "RuntimeError: of rank 3" in ended[1][1]
    assert "host 1 failed: " in ended[0][1] and "RuntimeError: of rank 3" in ended[0][1]
    aborting = FAILING.replace("raise RuntimeError('of rank 3')", "os.write(2, b'last'); os.abort()")
    (tmp_path / "script.py").write_text(aborting)
    ended = run_hosts(tmp_path, 2, 2, "run", "--device", "cpu", str(tmp_path / "script.py"))
    for _, output in ended:
        assert "last lines that rank 3 wrote to stderr:" in output and "rank 3 of 4 was killed by SIGABRT" in output


@pytest.mark.slow
def test_a_host_that_fails_before_they_meet_is_named_by_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It tells them where they wait already; else they do so until the bound."""
    (tmp_path / "corpus.txt").write_text("all work and no play makes jack a dull boy\n" * 300)
    monkeypatch.setenv("PET_RDZV_CONF", "join_timeout=15")
    nowhere = "/proc/nowhere"
    ended = run_hosts(
        tmp_path, 2, 2, "train", *KEYS, "--data.path", str(tmp_path / "corpus.txt"), XDG_CACHE_HOME=nowhere
    )
    assert [code for code, _ in ended] == [MISTAKE, MISTAKE], ended
    assert nowhere in ended[1][1] and "Traceback" not in ended[1][1]
    heard = f"host 1 failed: the cache {nowhere}" in ended[0][1]
    assert heard or "host 1 of 2 did not come to 127.0.0.1:" in ended[0][1]
