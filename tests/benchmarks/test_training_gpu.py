"""The GPU benchmark's logic at toy size on a CPU."""

from __future__ import annotations

import json
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from benchmarks import gpu_case, training_gpu
from benchmarks.gpu_case import Case, climb, is_out_of_memory, run_case, token_ids
from benchmarks.gpu_contenders import BUILDERS, IdStep
from benchmarks.gpu_models import SHAPES, build, flops_per_token, model_config
from tests.fork_server import call

CPU = torch.device("cpu")
BILLIONS = {"0.5B": 0.5, "1B": 1.0, "3B": 3.0, "13B-10L": 3.6}


def case(**changes: Any) -> Case:
    values: dict[str, Any] = {
        "family": "llama",
        "size": "toy",
        "sequence": 8,
        "device": "cpu",
        "contenders": ("fits4", "fits4-compile"),
        "ladder": (1, 2, 4, 8, 16),
        "rounds": 2,
        "steps": 2,
        "warmup": 1,
        "compile_mode": "model",
        "product": 32,
    }
    return Case(**(values | changes))


def limited(largest: int, tried: list[int]) -> Any:
    """A builder whose step runs out of memory above `largest` sequences."""

    def builder(config: Any, device: torch.device, compiled: str | None) -> IdStep:
        def step(ids: Tensor) -> Tensor:
            tried.append(len(ids))
            if len(ids) > largest:
                raise torch.OutOfMemoryError("planted: out of memory")
            return torch.tensor(1.0)

        return step

    return builder


@pytest.mark.parametrize(("family", "size"), [key for key in SHAPES if key[1] != "toy"])
def test_sizes_are_as_named(family: str, size: str) -> None:
    config = model_config(family, size, 2048)
    model = build(config, torch.device("meta"))
    total = sum(parameter.numel() for parameter in model.parameters())
    assert total / 1e9 == pytest.approx(BILLIONS[size], rel=0.15)
    expected = 6 * (total - config.vocab_size * config.hidden_size) + 6 * config.num_hidden_layers * 2048 * (
        config.hidden_size
    )
    assert flops_per_token(model, config, 2048) == expected


@pytest.mark.slow
def test_the_ladder_finds_the_largest_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    monkeypatch.setitem(BUILDERS, "fits4", (limited(4, tried), False))
    config = model_config("llama", "toy", 8)
    found = climb(case(), config, CPU, "fits4", None)
    assert found["microbatch"] == 4 and found["first_loss"] == 1.0 and "micro-batch 8" in found["stopped_by"]
    tried.clear()
    assert climb(case(), config, CPU, "fits4", 4)["microbatch"] == 4
    assert tried == [4, 4, 8]  # starts where the uncompiled one ended
    tried.clear()
    assert climb(case(), config, CPU, "fits4", 16)["microbatch"] == 4
    assert tried == [16, 8, 4, 4]
    monkeypatch.setitem(BUILDERS, "fits4", (limited(0, tried), False))
    assert climb(case(), config, CPU, "fits4", None)["microbatch"] == 0


def test_a_larger_batch_begins_with_the_smaller_ones_rows() -> None:
    config = model_config("llama", "toy", 8)
    assert torch.equal(token_ids(config, 4, 8, CPU)[:2], token_ids(config, 2, 8, CPU))


def test_out_of_memory_is_recognized_in_disguise() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("x"))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"))
    assert is_out_of_memory(RuntimeError("backend='inductor' raised: OutOfMemoryError: CUDA out of memory."))
    assert not is_out_of_memory(ValueError("shape mismatch"))


@pytest.mark.slow
def test_one_failing_contender_does_not_end_the_case(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(config: Any, device: torch.device, compiled: str | None) -> IdStep:
        raise ValueError("planted: broken")

    monkeypatch.setitem(BUILDERS, "broken", (broken, False))
    monkeypatch.setitem(BUILDERS, "never", (limited(0, []), False))
    monkeypatch.setitem(BUILDERS, "fits4", (limited(4, []), False))
    messages: list[tuple[str, Any]] = []
    this = case(contenders=("broken", "never", "fits4"))
    run_case(this, lambda kind, value: messages.append((kind, value)))
    result = training_gpu.collect(this, messages, "")
    broken_row, never_row, good = result["rows"]
    assert "planted: broken" in broken_row["failed"]
    assert never_row["microbatch"] == 0 and "out of memory" in never_row["stopped_by"]
    assert good["microbatch"] == 4 and len(good["turns"]) == 2 and good["turns"][0]["tokens"] == 32
    assert good["mfu"] == pytest.approx(good["tflops"] * 1e12 / result["limit_flops_per_second"])
    problems = training_gpu.check(result)
    assert len(problems) == 1 and "broken failed" in problems[0]  # what does not fit is a finding, no problem
    text = _text(training_gpu.render(result))
    assert "planted: broken" in text and "out of memory" in text


def test_disagreeing_losses_and_unfinished_cases_are_problems() -> None:
    rows = [{"contender": "a", "first_loss": 10.0}, {"contender": "b", "first_loss": 10.2}]
    result = {"name": "x", "ended": "cut short", "rows": rows}
    assert len(training_gpu.check(result)) == 2


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert training_gpu.main([]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err


def test_a_spent_budget_starts_nothing() -> None:
    result = training_gpu.measure(case(), time.monotonic() - 1, Console(quiet=True))
    assert "not started" in result["ended"] and not result["limit_flops_per_second"]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", pytest.param("neox", marks=pytest.mark.slow)])
def test_a_toy_run_on_the_cpu(family: str, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    arguments = ["--device", "cpu", "--toy", "--families", family, "--ladder", "1", "2", "--rounds", "1"]
    arguments += ["--steps", "1", "--warmup", "1", "--contenders", "shardwise", "torch", "autocast"]
    assert call(training_gpu.main, [*arguments, "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["cases"][0]["rows"]
    assert [row["microbatch"] for row in rows] == [2, 2, 2]
    ours, masters, _ = rows
    assert ours["first_loss"] == pytest.approx(masters["first_loss"], abs=2e-3)
    assert ours["turns"][0]["last_loss"] == pytest.approx(masters["turns"][0]["last_loss"], abs=5e-3)


@pytest.mark.slow
def test_single_switches_of_shardwise_run_at_toy_size(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    names = ["shardwise", "shardwise-fp8", "shardwise-checkpointed", "shardwise-checkpointed-eager"]
    arguments = [
        "--device",
        "cpu",
        "--toy",
        "--families",
        "neox",
        "--ladder",
        "1",
        "--rounds",
        "1",
        "--memory-gb",
        "40",
    ]
    arguments += ["--steps", "1", "--warmup", "1", "--base", "shardwise-checkpointed", "--json", str(path)]
    assert training_gpu.main([*arguments, "--contenders", *names, "shardwise-offloaded"]) == 0
    rows = {row["contender"]: row for row in json.loads(path.read_text())["cases"][0]["rows"]}
    exact, rounded = (rows[name]["turns"][0]["last_loss"] for name in names[:2])
    assert exact != rounded and rounded == pytest.approx(exact, rel=2e-2)
    assert rows["shardwise-checkpointed"]["base_ratio"]["median"] == 1.0
    assert all(row["base_ratio"]["median"] > 0 for row in rows.values()) and len(rows) == 5


def test_a_switch_that_the_machine_lacks_is_reported() -> None:
    this, messages = case(contenders=("shardwise-liger",)), []
    run_case(this, lambda kind, value: messages.append((kind, value)))
    (row,) = training_gpu.collect(this, messages, "")["rows"]
    assert "Liger's kernels run on a GPU" in row["failed"]


@pytest.mark.parametrize("name", ["litgpt", "torchtitan"])
def test_other_projects_train_the_same_model(name: str) -> None:
    """Where they are installed; elsewhere the table says that they are not."""
    config = model_config("llama", "toy", 32)
    ids = token_ids(config, 2, 32, CPU)
    if find_spec(name) is None:
        with pytest.raises(ModuleNotFoundError, match=name):
            BUILDERS[name][0](config, CPU, None)
        return
    ours, theirs = (BUILDERS[each][0](config, CPU, None) for each in ("torch", name))
    for _ in range(3):
        assert float(theirs(ids)) == pytest.approx(float(ours(ids)), abs=2e-3)


def test_torchtitan_has_no_neox() -> None:
    config = model_config("neox", "toy", 32)
    with pytest.raises((ValueError, ModuleNotFoundError), match=r"no gpt_neox|torchtitan"):
        BUILDERS["torchtitan"][0](config, CPU, None)


@pytest.mark.slow
def test_compiled_contenders(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    arguments = ["--device", "cpu", "--toy", "--families", "llama", "--ladder", "1", "--rounds", "1", "--steps", "1"]
    arguments += [
        "--contenders",
        "shardwise-compile",
        "shardwise-fp8-compile",
        "torch-compile",
        "autocast-compile",
        "--json",
        str(path),
    ]
    assert training_gpu.main(arguments) == 0
    assert all(row["microbatch"] == 1 for row in json.loads(path.read_text())["cases"][0]["rows"])


def _text(table: Any) -> str:
    console = Console(width=130)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_rotation_gives_everyone_every_place() -> None:
    assert [gpu_case._rotated("abc", number) for number in range(3)] == [list("abc"), list("bca"), list("cab")]
