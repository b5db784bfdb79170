"""Every example, run as it stands with its sizes cut: two ranks, a few steps, its own output and cache directories.

One is run as a user would, with workers of its own; the others on the ranks of the test session, as under torchrun.
"""

from __future__ import annotations

import json
import math
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoTokenizer

from examples.sums import conversations, held_out
from shardwise.commands.cli import main
from shardwise.job.axes import second_views
from shardwise.job.sources import load_job
from shardwise.plan.plan import World, resolve
from shardwise.testing.world import WorldPool
from shardwise.training.setup import study
from tests.fork_server import run_python
from tools.reference.tables import FILES, METRICS

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
MOST_LINES = 60
STEPS = 2
FILE_JOBS = ("images.yaml", "speech.yaml", "image_chat.yaml")
JOBS = {"train_text.yaml": 2, "masked_lm.yaml": 2, "smp_options.yaml": 2, "tensor.yaml": 2, "pipeline.yaml": 2,
        "long_sequences.yaml": 2, "experts.yaml": 2, "combined.yaml": 8}  # and its ranks  # fmt: skip
QUICK = ("train_text.yaml", "pipeline.yaml")
RUN = [job if job[0] in QUICK else pytest.param(*job, marks=pytest.mark.slow) for job in JOBS.items()]


def toy_keys(tmp_path: Path) -> list[str]:
    cache = f"data.cache_directory={tmp_path / 'cache'}"
    return [f"training.steps={STEPS}", "optimizer.warmup_steps=0", f"output={tmp_path / 'run'}", cache]


def records_of(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def check_run(output: Path) -> None:
    """A whole run stands in the directory, and every key and file of it is in the reference."""
    records = records_of(output)
    assert [record["step"] for record in records if "loss" in record] == list(range(1, STEPS + 1))
    assert "validation_loss" in records[-1]
    assert {key for record in records for key in record} <= set(METRICS)
    assert {path.name for path in output.iterdir()} <= set(FILES)
    assert (output / "report.html").stat().st_size > 0
    assert (output / "model" / "model.safetensors").is_file()


def test_every_example_is_run_here_and_short() -> None:
    files = [path for path in EXAMPLES.iterdir() if path.is_file()]
    assert {path.name for path in files} == {
        *JOBS,
        *("chat.yaml", "chat.jinja", "chat_rows.py", "chat_lora.yaml", "sums.py"),
        *("dpo.yaml", "preference_rows.py"),
        *FILE_JOBS,
        *("files.py", "diffusion.py"),
        "own_module.py",
        "library.py",
        "smp_gpt.py",
        "smp_sharded.py",
        "smp_tutorial.ipynb",
    }  # the last three in tests/smp/test_run.py
    for path in [path for path in files if path.suffix != ".ipynb"]:
        assert len(path.read_text().splitlines()) <= MOST_LINES, path


def run_job(file: str, words: list[str]) -> int:
    os.chdir(ROOT)
    return main(["train", file, *words])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", JOBS)
def test_jobs_have_a_plan(name: str) -> None:
    """On as many ranks as they name."""
    job = load_job(EXAMPLES / name)
    plan = resolve(job, World(JOBS[name], "cpu", JOBS[name]), study(job))
    placed = [degree for axis, degree in plan.degrees.items() if axis not in second_views()]
    assert math.prod(placed) == JOBS[name]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name, ranks", RUN)
def test_jobs(world_pool: WorldPool, tmp_path: Path, name: str, ranks: int) -> None:
    words = [f"--{word}" for word in toy_keys(tmp_path)]
    assert world_pool.run(ranks, run_job, str(EXAMPLES / name), words) == [0] * ranks
    check_run(tmp_path / "run")
    job = yaml.safe_load((tmp_path / "run" / "job.yaml").read_text())
    if name == "smp_options.yaml":
        assert job["memory"]["offload_activations"] and job["training"]["gradient_accumulation"] == 2


@pytest.mark.slow
@pytest.mark.timeout(900)  # the whole example, on a busy machine
def test_experts_are_evenly_used_at_the_end(world_pool: WorldPool, tmp_path: Path) -> None:
    """Of the layer where use is most uneven; the report shows it."""
    words = [f"--output={tmp_path / 'run'}", f"--data.cache_directory={tmp_path / 'cache'}"]
    assert world_pool.run(2, run_job, str(EXAMPLES / "experts.yaml"), words, timeout=800) == [0] * 2
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    loads = [record["expert_load"] for record in records if "expert_load" in record]
    assert loads[-1] < 1.5 and sum(loads[-10:]) / 10 < 1.5 < max(loads)
    assert f"at the end {loads[-1]:.2f}, and 0% of the experts" in (tmp_path / "run" / "report.html").read_text()


def test_chat(world_pool: WorldPool, tmp_path: Path) -> None:
    """From a tiny model drawn anew, in the place of the default run's."""
    rows = tmp_path / "chats.jsonl"
    run_script(str(EXAMPLES / "chat_rows.py"), [str(rows)])
    config = {"model_type": "gpt2", "n_embd": 16, "n_head": 2, "n_layer": 1, "n_positions": 128, "vocab_size": 300}
    keys = {"model.path": None, "model.config": config, "data.vocabulary_size": 300}
    keys |= {"training.epochs": None, "data.max_documents": 40}
    words = [f"--{key}={json.dumps(value)}" for key, value in keys.items()]
    words += [f"--data.path={rows}", *(f"--{word}" for word in toy_keys(tmp_path))]
    assert world_pool.run(2, run_job, str(EXAMPLES / "chat.yaml"), words) == [0] * 2
    check_run(tmp_path / "run")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    text = tokenizer.apply_chat_template([{"role": "user", "content": "3 + 4?"}], tokenize=False)
    assert text == "user\n3 + 4?<|endoftext|>"


def test_no_held_out_question_is_trained_on() -> None:
    trained, unseen = ({row["messages"][0]["content"] for row in rows} for rows in (conversations(), held_out()))
    assert len(trained) == 300 and len(unseen) == 100
    assert not trained & unseen


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_chat_lora_learns_to_add(tmp_path: Path) -> None:
    """The whole of it, behind the default run: from nearly no right answer to more than nine of ten."""
    base = [f"--output={tmp_path / 'base'}"]
    lora = [str(EXAMPLES / "chat_lora.yaml"), f"--model.path={tmp_path / 'base' / 'model'}"]
    for words in (base, [*lora, f"--output={tmp_path / 'run'}"]):
        done = run_python("-m", "shardwise", "train", *words, cwd=ROOT, timeout=900)
        assert done.returncode == 0, done.stderr
    shares = [record["exact_match/held_out"] for record in records_of(tmp_path / "run") if "validation_loss" in record]
    assert shares[-1] > 0.9


@pytest.mark.slow
def test_chat_lora(world_pool: WorldPool, tmp_path: Path) -> None:
    """The rows of its own function, on a tiny model drawn anew."""
    config = {"model_type": "gpt2", "n_embd": 16, "n_head": 2, "n_layer": 1, "n_positions": 128, "vocab_size": 300}
    keys = {"model.path": None, "model.config": config, "data.vocabulary_size": 300, "training.epochs": None}
    keys |= {"evaluation.answers": 3, "data.max_documents": 60, "training.evaluate_every": 1, "checkpoint.every": 1}
    keys |= {"adapter.rank": 4, "adapter.modules_to_save": []}
    words = [f"--{key}={json.dumps(value)}" for key, value in keys.items()]
    words += [f"--{word}" for word in toy_keys(tmp_path)]
    assert world_pool.run(2, run_job, str(EXAMPLES / "chat_lora.yaml"), words) == [0] * 2
    records = records_of(tmp_path / "run")
    assert [record["exact_match/held_out"] for record in records if "validation_loss" in record] == [0.0] * STEPS
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.slow
def test_dpo(world_pool: WorldPool, tmp_path: Path) -> None:
    """From a tiny model drawn anew, in the place of chat.yaml's."""
    rows = tmp_path / "preferences.jsonl"
    run_script(str(EXAMPLES / "preference_rows.py"), [str(rows)])
    config = {"model_type": "gpt2", "n_embd": 16, "n_head": 2, "n_layer": 1, "n_positions": 128, "vocab_size": 300}
    keys = {"model.path": None, "model.config": config, "data.vocabulary_size": 300}
    keys |= {"model.dropout": 0.0, "training.epochs": None, "data.max_documents": 40}
    words = [f"--{key}={json.dumps(value)}" for key, value in keys.items()]
    words += [f"--data.path={rows}", f"--data.chat_template={EXAMPLES / 'chat.jinja'}"]
    words += [f"--{word}" for word in toy_keys(tmp_path)]
    assert world_pool.run(2, run_job, str(EXAMPLES / "dpo.yaml"), words) == [0] * 2
    check_run(tmp_path / "run")
    records = records_of(tmp_path / "run")
    assert records[0]["loss"] == pytest.approx(math.log(2)) and records[0]["rewards_margin"] == 0
    assert records[1]["rewards_margin"] != 0 and 0 <= records[-1]["validation_rewards_accuracy"] <= 1


def run_script(file: str, words: list[str]) -> None:
    sys.argv = [file, *words]
    runpy.run_path(file, run_name="__main__")


@pytest.mark.slow
@pytest.mark.timeout(800)
@pytest.mark.parametrize("name", FILE_JOBS)
def test_jobs_on_files(world_pool: WorldPool, tmp_path: Path, name: str) -> None:
    """Whole, and from the checkpoint of its first step; the model's directory has its processor."""
    run_script(str(EXAMPLES / "files.py"), [str(tmp_path / "files")])
    data = yaml.safe_load((EXAMPLES / name).read_text())["data"]
    words = [f"--data.{key}={value}" for key, value in data.items() if str(value).startswith("runs/files")]
    words = [word.replace("runs/files", str(tmp_path / "files")) for word in words]
    words += ["--optimizer.warmup_steps=0", "--optimizer.schedule=constant", "--checkpoint.resume=auto"]
    words += ["--checkpoint.every=1"]
    for output, steps in (("run", STEPS), ("parts", 1), ("parts", STEPS)):
        own = [f"--output={tmp_path / output}", f"--training.steps={steps}"]
        assert world_pool.run(2, run_job, str(EXAMPLES / name), [*words, *own], timeout=240) == [0] * 2
    check_run(tmp_path / "run")
    whole, parts = (
        {record["step"]: record["loss"] for record in records_of(tmp_path / output) if "loss" in record}
        for output in ("run", "parts")
    )
    assert whole == parts and len(whole) == STEPS
    config = "processor_config.json" if name == "image_chat.yaml" else "preprocessor_config.json"
    assert (tmp_path / "run" / "model" / config).is_file()


def test_diffusion(tmp_path: Path) -> None:
    words = [word for word in toy_keys(tmp_path) if not word.startswith("data.")]
    done = run_python("diffusion.py", *words, cwd=EXAMPLES, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    check_run(tmp_path / "run")


@pytest.mark.slow
def test_library(world_pool: WorldPool, tmp_path: Path) -> None:
    world_pool.run(2, run_script, str(EXAMPLES / "library.py"), toy_keys(tmp_path))
    check_run(tmp_path / "run")


def test_own_module(tmp_path: Path) -> None:
    words = [word for word in toy_keys(tmp_path) if not word.startswith("data.")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = run_python("own_module.py", *words, cwd=EXAMPLES, env=environment)
    assert done.returncode == 0, done.stderr
    assert "TrainingResult(validation_loss=" in done.stdout
    check_run(tmp_path / "run")
