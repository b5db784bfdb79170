"""`shardwise evaluate`: lm-eval's tasks on a sharded model have the numbers of lm-eval's own Hugging Face model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from shardwise.checkpoint.catalog import find, read_manifest
from shardwise.checkpoint.export import export_checkpoint
from shardwise.checkpoint.manifest import Manifest, Progress
from shardwise.commands import workers
from shardwise.commands.cli import main
from shardwise.commands.evaluate import Questions, _table, evaluate_rank, job_of_checkpoint
from shardwise.data.corpus import with_format
from shardwise.errors import ConfigError
from shardwise.job.schema import Job
from shardwise.testing.world import WorldError, WorldPool
from tests.checkpoint.made import save_steps
from tests.commands.lm_eval_double import lm_eval_double
from tests.data.chats import END, PLAIN, byte_tokenizer, write_rows

CONFIG = {
    "model_type": "llama", "vocab_size": 257, "hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "intermediate_size": 13, "max_position_embeddings": 48,
}  # fmt: skip
SUMS = [{"question": f"{a}+{b}?", "answers": [str(a + b), "12"], "right": 0} for a in range(4) for b in range(3)]
TASKS: dict[str, str] = {
    "choice": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{answers}}"
doc_to_target: right
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "written": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answers[0]}}"
generation_kwargs: {until: ["."], max_gen_toks: 20}
metric_list: [{metric: exact_match}]
""",
    "rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question * 20}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}]
""",
}
KINDS: dict[str, dict[str, Any]] = {
    "whole": {},
    "adapters": {"adapter": {"kind": "lora", "rank": 2}},
    "preference": {},
}


def job_of(directory: Path, kind: str = "whole") -> Job:
    """A model of bytes, and rows of what it is trained on."""
    byte_tokenizer(directory / "tokenizer", PLAIN)
    pairs = [{"prompt": row["question"], "completion": str(row["answers"][0])} for row in SUMS]
    preferences = [{"prompt": row["question"], "chosen": "3.", "rejected": row["answers"][1]} for row in SUMS]
    rows = write_rows(directory / "rows.jsonl", preferences if kind == "preference" else pairs)
    job = {
        "model": {"config": CONFIG},
        "parallel": {"device": "cpu", "workers": 2},
        "precision": {"compute": "fp32"},
        "optimizer": {"learning_rate": 1e-2, "warmup_steps": 0},
        "training": {"steps": 3, "sequences_per_step": 4},
        "data": {
            "path": str(rows), "tokenizer": str(directory / "tokenizer"), "sequence_length": 48,
            "cache_directory": str(directory / "cache"), "validation_fraction": 0.3,
        },
        "output": str(directory / "run"),
        **KINDS[kind],
    }  # fmt: skip
    return with_format(Job.model_validate(job))


def write_tasks(directory: Path) -> list[str]:
    """Write the tasks, whose data is a file beside them."""
    data = write_rows(directory / "sums.jsonl", SUMS)
    files = []
    for name, rest in TASKS.items():
        head = f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test\n"
        (directory / f"{name}.yaml").write_text(head + rest)
        files.append(str(directory / f"{name}.yaml"))
    return files


def test_a_missing_package_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["evaluate", "run", "--tasks", "sums.yaml"]) == 2
    assert "pip install 'shardwise[lm-eval]'" in capsys.readouterr().err


@lm_eval_double()
def test_mistakes_are_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "sums.yaml").write_text("task: sums")
    assert main(["evaluate", "run", "--tasks", str(tmp_path / "sum.yaml")]) == 2
    assert f"is no file. Did you mean '{tmp_path}/sums.yaml'?" in capsys.readouterr().err
    assert main(["evaluate", "run", "--tasks", "sums.yaml", "--optimizer.learning_rate", "1"]) == 2
    assert "--optimizer.learning_rate is not used by evaluate" in capsys.readouterr().err
    asked = ["evaluate", "run", "--tasks", str(tmp_path / "sums.yaml")]
    assert main([*asked, "--json", str(tmp_path / "none" / "results.json")]) == 2
    assert "results.json cannot be written" in capsys.readouterr().err
    assert main(["evaluate", "run"]) == 2
    assert "--tasks" in capsys.readouterr().err


@lm_eval_double()
def test_tasks_of_one_name_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only the last would be asked."""
    files = [tmp_path / f"{name}.yaml" for name in ("one", "two")]
    for file in files:
        file.write_text("task: sums\n")
    assert main(["evaluate", str(tmp_path), "--tasks", *map(str, files)])
    assert "two.yaml': another file has a task 'sums' too; rename one" in capsys.readouterr().err


ASKED: dict[str, dict[str, Any]] = {
    "choice": {"output_type": "loglikelihood", "prompt": "1+2?", "continuation": " 3"},
    "rolling": {"output_type": "loglikelihood_rolling", "prompt": "1+2?" * 20},
    "written": {
        "output_type": "generate_until", "prompt": "1+2?", "generation_kwargs": {"until": ["."], "max_gen_toks": 20},
    },
}  # fmt: skip


def ask_double(job: Job, device: torch.device, checkpoint: str, questions: Questions) -> dict[str, Any] | None:
    with lm_eval_double():
        return evaluate_rank(job, device, checkpoint, questions)


def summed_nats(model: Any, ids: list[int], predicted: int) -> float:
    """Return the log-probability of the last tokens of a text, by the whole model."""
    logits = model(torch.tensor([ids[:-1]])).logits[0].log_softmax(-1)
    return float(logits.gather(-1, torch.tensor(ids[1:])[:, None])[-predicted:].sum())


@torch.no_grad()
@lm_eval_double()
def test_a_sharded_model_answers_as_the_exported_one(
    world_pool: WorldPool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command asks and shows; a task whose answers are drawn is refused."""
    job, files = job_of(tmp_path), []
    for name, task in ASKED.items():
        files.append(str(tmp_path / f"{name}.yaml"))
        Path(files[-1]).write_text(json.dumps({"task": name, **task}))
    drawn = {**ASKED["written"], "generation_kwargs": {"until": ["."], "do_sample": True, "temperature": 0.7}}
    (tmp_path / "drawn.yaml").write_text(json.dumps({"task": "drawn", **drawn}))
    world_pool.run(2, save_steps, job, [3])
    model = AutoModelForCausalLM.from_pretrained(export_checkpoint(job.output, tmp_path / "model"))

    def in_workers(job: Job, function: Any, *arguments: Any) -> Any:
        return world_pool.run(2, ask_double, job, torch.device("cpu"), *arguments)[0]

    monkeypatch.setattr(workers, "in_workers", in_workers)
    words = ["evaluate", job.output, "--json", str(tmp_path / "results.json"), "--tasks"]
    assert main([*words, *files]) == 0
    assert "0.5000" in capsys.readouterr().out  # the error beside its metric
    results = json.loads((tmp_path / "results.json").read_text())["results"]

    tokenizer = AutoTokenizer.from_pretrained(job.data.tokenizer)
    prompt, chosen, text = (tokenizer.encode(text) for text in ("1+2?", "1+2? 3", END + "1+2?" * 20))
    assert results["choice"]["nats,none"] == pytest.approx(summed_nats(model, chosen, 2), rel=1e-5)
    windows = [summed_nats(model, text[start : start + 49], len(text[start : start + 49]) - 1) for start in (0, 48)]
    assert results["rolling"]["nats,none"] == pytest.approx(sum(windows), rel=1e-5)
    written = model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0, len(prompt) :]
    whole = tokenizer.decode(written)
    assert results["written"]["written,none"] == min(whole.split(".")[0], whole.split(END)[0], key=len)
    with pytest.raises(WorldError, match=r"do_sample=true, temperature=0\.7"):
        main([*words, str(tmp_path / "drawn.yaml")])


def peer_results(model: Path, files: list[str]) -> dict[str, Any]:
    """Return what lm-eval's own model of an exported directory comes to."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_defaults=False)
    tasks = [task for file in files for task in manager.load([file])["tasks"].values()]
    peer = HFLM(pretrained=str(model), device="cpu", batch_size=1, dtype="float32")
    results = simple_evaluate(peer, tasks=tasks, bootstrap_iters=0)
    assert results is not None
    found: dict[str, Any] = results["results"]
    return found


def compare(mine: dict[str, Any], peer: dict[str, Any]) -> None:
    assert mine.keys() == peer.keys() == TASKS.keys()
    for task, values in peer.items():
        numbers = {key: value for key, value in values.items() if isinstance(value, float)}
        assert numbers and {key: mine[task][key] for key in numbers} == pytest.approx(numbers, rel=1e-4), task


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "the run's": (2, {}),
    "one rank": (1, {"parallel.workers": 1}),
    "tensor 2": (2, {"parallel.tensor_parallel_degree": 2}),
    "pipeline 2": (2, {"parallel.pipeline_parallel_degree": 2}),
}


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_of_lm_eval(world_pool: WorldPool, tmp_path: Path, kind: str) -> None:
    pytest.importorskip("lm_eval")
    job, files = job_of(tmp_path, kind), write_tasks(tmp_path)
    world_pool.run(2, save_steps, job, [3])
    merge = {"merge": True} if kind == "adapters" else {}
    peer = peer_results(export_checkpoint(job.output, tmp_path / "model", **merge), files)
    store, name = find(job.output)
    questions = Questions(tuple(files), str(tmp_path / "tokenizer"), None, False, None)
    for ranks, keys in LAYOUTS.values() if kind == "whole" else [LAYOUTS["the run's"]]:
        asked = job_of_checkpoint(read_manifest(store, name), keys)
        device, path = torch.device("cpu"), f"{store.root}/{name}"
        compare(world_pool.run(ranks, evaluate_rank, asked, device, path, questions)[0]["results"], peer)


@lm_eval_double()
def test_a_tokenizer_without_an_end_is_named(tmp_path: Path) -> None:
    from shardwise.commands.lm_eval_model import ShardedLanguageModel

    byte_tokenizer(tmp_path, PLAIN)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    model = ShardedLanguageModel.__new__(ShardedLanguageModel)
    model.tokenizer = tokenizer
    assert model.prefix_token_id == tokenizer.eos_token_id
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match=r"has no eos_token.*tokenizer_config\.json"):
        _ = model.prefix_token_id


def test_code_that_a_checkpoint_names_is_not_run(tmp_path: Path) -> None:
    """A command line says that the base may run its own."""
    written = job_of(tmp_path).model_dump(mode="json")
    written["model"] |= {"path": str(tmp_path), "config": None, "trust_remote_code": True}
    manifest = Manifest(
        progress=Progress(), optimizer="SGD", tensors={}, files={}, job=written, plan={}, data={}, written="",
        versions={},
    )  # fmt: skip
    asked = job_of_checkpoint(manifest, {})
    assert not asked.model.trust_remote_code
    assert job_of_checkpoint(manifest, {"model.trust_remote_code": True}).model.trust_remote_code


def test_numbers_of_several_filters_are_told_apart() -> None:
    """As GSM8K has them: the first number of an answer, and the last."""
    values = {"exact_match,strict-match": 0.25, "exact_match_stderr,strict-match": 0.1, "exact_match,none": 0.5}
    table = _table({"results": {"gsm8k": values}, "n-samples": {"gsm8k": {"effective": 4}}})
    assert [*table.columns[2].cells] == ["exact_match, strict-match", "exact_match"]
    assert [*table.columns[3].cells] == ["0.2500", "0.5000"]


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_the_command(world_pool: WorldPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It shows a table, and refuses what a task cannot ask, and a tokenizer that is gone."""
    pytest.importorskip("lm_eval")
    job, files = job_of(tmp_path), write_tasks(tmp_path)
    world_pool.run(2, save_steps, job, [3])
    written = Path(files[1])
    words = ["evaluate", job.output, "--tasks", str(written), "--parallel.workers", "1"]
    assert main([*words, "--apply-chat-template", "--limit", "2", "--json", str(tmp_path / "results.json")]) == 0
    assert "exact_match" in capsys.readouterr().out
    assert json.loads((tmp_path / "results.json").read_text())["n-samples"]["written"]["effective"] == 2
    for old, new, error in (
        ("{until", "{do_sample: true, temperature: 0.7, until", "do_sample=true, temperature=0.7"),
        ("max_gen_toks: 20", "max_gen_toks: 48", "answers of 48 tokens"),
        ("sums.jsonl", "sum.jsonl", "sum.jsonl"),
    ):
        text = written.read_text()
        written.write_text(text.replace(old, new))
        assert main(words) != 0
        assert error in capsys.readouterr().err
        written.write_text(text)
    byte_tokenizer(tmp_path / "tokenizer", None)
    (tmp_path / "tokenizer" / "chat_template.jinja").unlink()
    assert main([*words, "--apply-chat-template"]) == 2
    assert "has no chat template; give --data.chat_template FILE" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "tokenizer")
    assert main(words) == 2
    assert "is not there any more; give --data.tokenizer DIRECTORY" in capsys.readouterr().err
