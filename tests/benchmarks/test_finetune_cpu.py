"""The benchmark of fine-tuning at toy size: its options, and one real run of shardwise in each kind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import finetune_cpu
from benchmarks.workload import Workload
from tests.benchmarks.test_training_cpu import TOY
from tests.fork_server import call


def test_a_kind_that_is_unknown_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        finetune_cpu.main(["--kind", "dpo"])
    assert "--kind: invalid choice: 'dpo'" in capsys.readouterr().err


def test_frozen_weights_have_two_thirds_of_the_products() -> None:
    attention = 12 * 4 * 256 * 512
    whole, frozen = Workload().flops_per_token - attention, Workload(frozen=True).flops_per_token - attention
    assert frozen == whole * 2 / 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "lora"])
def test_shardwise_alone(tmp_path: Path, kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--ranks", "2", "--rounds", "1", "--steps", "1", "--warmup", "1", "--json", str(tmp_path / "out.json")]
    code = call(finetune_cpu.main, ["--kind", kind, *TOY, *options, "--contenders", "shardwise"], timeout=600)
    assert code == 0
    (run,) = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert [row["contender"] for row in run["rows"]] == ["shardwise"]
    assert capfd.readouterr().out.count("peak memory of shardwise") == 2
