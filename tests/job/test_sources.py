"""Reading jobs: every source, their precedence, and what is said about wrong keys and values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import ConfigError
from shardwise.job.keys import leaf_keys
from shardwise.job.schema import Job
from shardwise.job.sources import (
    ENVIRONMENT,
    SmpOptionWarning,
    job_to_yaml,
    load_job,
    overlay,
    read_job,
    take_overrides,
)


def read(source: Any = None, overrides: Any = (), environ: dict[str, str] | None = None) -> Job:
    return read_job(source, overrides, environ or {}).job


def env(**options: Any) -> dict[str, str]:
    return {ENVIRONMENT: json.dumps(options)}


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_no_source_is_the_default_job() -> None:
    assert read() == Job()


def test_yaml_dict_and_job(tmp_path: Path) -> None:
    path = written(
        tmp_path, "training:\n  steps: 30\noptimizer:\n  options: {eps: 1e-6, betas: [0.9, 0.95]}\nobserve:\n"
    )
    for source in (
        path,
        str(path),
        {"training": {"steps": 30}, "optimizer": {"options": {"eps": 1e-6, "betas": [0.9, 0.95]}}},
    ):
        job = read(source)
        assert job.training.steps == 30
        assert job.optimizer.options == {"eps": 1e-6, "betas": [0.9, 0.95]}
    assert read(read(path)) == read(path)


@pytest.mark.parametrize(
    "data",
    [
        {},
        {
            "model": {"config": {"model_type": "gpt2", "n_embd": 64}, "dropout": 0.0},
            "parallel": {"sharded_data_parallel_degree": 2, "placement_strategy": "spread"},
            "optimizer": {"learning_rate": 1e-8, "clip_norm": None, "options": {"betas": [0.9, 0.999]}},
            "precision": {"compute": "fp16", "loss_scale": {"init_scale": 2.0**32}},
            "data": {"path": "Übung/ä b.txt"},
            "observe": {"profile": [1, 2], "sample_prompt": "on: [a]\n"},
            "output": "null",
        },
    ],
)
def test_yaml_round_trip(tmp_path: Path, data: dict[str, Any]) -> None:
    job = read(data)
    text = job_to_yaml(job)
    assert read(written(tmp_path, text)) == job
    assert job_to_yaml(Job()).startswith("model:")


def test_precedence(tmp_path: Path) -> None:
    path = written(tmp_path, "parallel: {sharded_data_parallel_degree: 1, workers: 1}\n")
    key = "--parallel.sharded_data_parallel_degree"
    assert read(path).parallel.sharded_data_parallel_degree == 1
    assert read(path, environ=env(sharded_data_parallel_degree=2)).parallel.sharded_data_parallel_degree == 2
    job = read(path, [key, "4"], env(sharded_data_parallel_degree=2))
    assert job.parallel.sharded_data_parallel_degree == 4
    assert job.parallel.workers == 1


def test_the_environment_is_read_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, '{"sharded_data_parallel_degree": 2}')
    assert load_job().parallel.sharded_data_parallel_degree == 2


@pytest.mark.parametrize("text", ["{", "[1]", '"x"'])
def test_a_broken_environment_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match=f"{ENVIRONMENT}=.*must be a JSON object"):
        read(environ={ENVIRONMENT: text})


def test_smp_options_as_the_source_inside_yaml_and_beside_own_keys(tmp_path: Path) -> None:
    bare = {"sharded_data_parallel_degree": 2, "bf16": True}
    nested = {"enabled": True, "parameters": bare}
    path = written(tmp_path, f"smp_options: {json.dumps(nested)}\ntraining: {{steps: 3}}\n")
    for source in (bare, nested, {"smdistributed": {"modelparallel": nested}}, {"smp_options": nested}, path):
        job = read(source)
        assert (job.parallel.sharded_data_parallel_degree, job.precision.compute) == (2, "bf16")
    assert read(path).training.steps == 3


def test_own_keys_and_smp_options_of_one_source_have_to_agree() -> None:
    source = {"smp_options": {"sharded_data_parallel_degree": 2}, "parallel": {"sharded_data_parallel_degree": 4}}
    with pytest.raises(ConfigError, match=r"degree=4 and smp_options sharded_data_parallel_degree=2 disagree"):
        read(source)
    source["parallel"]["sharded_data_parallel_degree"] = 2
    assert read(source).parallel.sharded_data_parallel_degree == 2


def test_notes_reach_the_user_both_ways() -> None:
    loaded = read_job({"sharded_data_parallel_degree": 2, "skip_tracing": True}, environ=env(skip_tracing=True))
    assert len(loaded.notes) == 1  # said once, though it came twice
    assert "skip_tracing=True has no effect here" in loaded.notes[0]
    with pytest.warns(SmpOptionWarning, match="skip_tracing"):
        load_job({"sharded_data_parallel_degree": 2, "skip_tracing": True}, environ={})


def test_smp_defaults_give_way_to_own_keys() -> None:
    assert read({"ddp": True}).parallel.sharded_data_parallel_degree == 1
    own = {"smp_options": {"ddp": True}, "parallel": {"sharded_data_parallel_degree": 4}}
    assert read(own).parallel.sharded_data_parallel_degree == 4


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (["--training.steps", "30"], "training.steps", 30),
        (["--training.steps=30"], "training.steps", 30),
        (["training.steps=30"], "training.steps", 30),
        (["--model.compile"], "model.compile", True),
        (["--model.compile", "--training.steps", "3"], "model.compile", True),
        (["--observe.sample", "off"], "observe.sample", False),
        (["--optimizer.clip_norm", "null"], "optimizer.clip_norm", None),
        (["--optimizer.learning_rate", "1e-4"], "optimizer.learning_rate", 1e-4),
        (["--optimizer.options", '{"eps": 1e-6}'], "optimizer.options", {"eps": 1e-6}),
        (["--optimizer.options.betas", "[0.9, 0.95]"], "optimizer.options", {"betas": [0.9, 0.95]}),
        (["--model.config.n_layer=2", "--model.config.n_head=4"], "model.config", {"n_layer": 2, "n_head": 4}),
        (["--model.config", "{model_type: gpt2}"], "model.config", {"model_type": "gpt2"}),
        (["--model.config", "dir/config.json"], "model.config", "dir/config.json"),
        (["--precision.loss_scale.init_scale", "1024"], "precision.loss_scale.init_scale", 1024.0),
        (["--observe.profile", "[10, 12]"], "observe.profile", [10, 12]),
        (["--observe.wandb", "on"], "observe.wandb", "on"),  # a key that holds text takes it as it stands
        (["--data.path", "2024"], "data.path", "2024"),
        (["--data.path", "null"], "data.path", None),
        (["--data.path=a=b: [c"], "data.path", "a=b: [c"),
        (["output=elsewhere"], "output", "elsewhere"),
    ],
)  # fmt: skip
def test_overrides(words: list[str], key: str, value: Any) -> None:
    result: Any = read(None, words)
    for name in key.split("."):
        result = getattr(result, name)
    assert result == value
    assert type(result) is type(value)


def test_overrides_from_python() -> None:
    job = read({"training": {"steps": 5, "seed": 3}}, {"training.steps": 7, "output": "there"})
    assert (job.training.steps, job.training.seed, job.output) == (7, 3, "there")


def test_overrides_leave_the_source_alone() -> None:
    source = {"training": {"steps": 5}}
    read(source, {"training.steps": 7})
    assert source == {"training": {"steps": 5}}


def test_take_overrides_keeps_the_other_words() -> None:
    words = ["job.yaml", "--training.steps", "3", "--print-plan", "--model.compile", "other.yaml", "--output=x.y"]
    assert take_overrides(words) == (
        ["job.yaml", "--print-plan", "other.yaml", "--output=x.y"],
        [("training.steps", "3"), ("model.compile", "true")],
    )


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"workers": 4}, "unknown key workers=4. Did you mean 'parallel.workers'?"),
        ({"factory": "a:b"}, "unknown key factory='a:b'. Did you mean 'model.factory' or 'data.factory'?"),
        ({"training": {"workers": 4}}, "unknown key training.workers=4. Did you mean 'parallel.workers'?"),
        ({"parallel": {"worker": 4}}, "unknown key parallel.worker=4. Did you mean 'parallel.workers'?"),
        ({"paralel": {"workers": 4}}, "Did you mean 'parallel'?"),
        ({"lerning_rate": 4}, "Did you mean 'optimizer.learning_rate'?"),
        ({"parallel": {"partitions": 4}}, "partitions is an SMP option: put it under `smp_options`."),
        ({"parallel": {"zzz": 4}}, "Known: parallel.workers, parallel.device, "),
        ({"training": {"steps": "many"}}, "training.steps='many': must be a valid integer"),
        ({"training": {"steps": 0}}, "training.steps=0: must be greater than or equal to 1; use 1"),
        ({"training": {"steps": 2.6}}, "must be a valid integer, got a number with a fractional part; use 3"),
        ({"training": {"steps": True}}, "training.steps=True: must be a number"),
        ({"precision": {"loss_scale": {"init_scale": False}}}, "loss_scale.init_scale=False: must be a number"),
        ({"training": 3}, "training=3: must be a section with keys of its own; known: steps, "),
        ({"data": {"sources": [None]}}, "data.sources[0]=None: must be a section with keys of its own; known: name, "),
        (
            {"training": {"batch_size_schedule": [{"until_samples": 32}]}},
            "training.batch_size_schedule[0].sequences_per_step is missing beside {'until_samples': 32}",
        ),
        ({"model": {"dropout": 1.5}}, "model.dropout=1.5: must be less than or equal to 1; use 1"),
        ({"precision": {"compute": "bf61"}}, "must be 'auto', 'fp64', 'fp32', 'bf16' or 'fp16'; use bf16"),
        ({"precision": {"compute": "fp8"}}, "'bf16' or 'fp16'; or set precision.fp8"),
        ({"model": {"config": 3}}, "model.config=3: must be a valid string or a valid dictionary"),
        (
            {"optimizer": {"groups": [{"parameters": ["a"], "lr": 1.0}]}},
            "unknown key optimizer.groups[0].lr=1.0. Known: learning_rate, optimizer, options, parameters, "
            "weight_decay.",
        ),
        (
            {"optimizer": {"groups": [{"parameters": ["a"], "learning_rate": True}]}},
            "optimizer.groups[0].learning_rate=True: must be a valid number",
        ),
        ({"optimizer": {"groups": [{"weight_decay": 0.0}]}}, "optimizer.groups[0].parameters is missing"),
        ({"observe": {"profile": [1, "b"]}}, "observe.profile[1]='b': must be a valid integer"),
    ],
)  # fmt: skip
def test_wrong_keys_and_values(data: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read(data)
    assert says in str(raised.value)


def test_every_wrong_key_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        read({"training": {"steps": 0, "sed": 1}, "output": 3})
    lines = str(raised.value).splitlines()
    assert len(lines) == 3
    assert all(any(key in line for line in lines) for key in ("training.steps=0", "training.sed=1", "output=3"))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--training.step", "3"], "unknown key training.step. Did you mean 'training.steps'?"),
        (["--trainin.steps", "3"], "Did you mean 'training.steps'?"),
        (["--precision.loss_scale", "3"], "precision.loss_scale is a section; set one of its keys: static"),
        (["--training.steps"], "--training.steps needs a value, e.g. --training.steps=32"),
        (["--training.steps", "--model.compile"], "--training.steps needs a value"),
        (["--training.steps", "[3"], "training.steps='[3' is not YAML"),
        (["steps"], "override 'steps' must be"),
        (["--model.path", "m", "--model.path.x", "3"], "unknown key model.path.x"),
        (["--model.config", "m", "--model.config.x", "3"], "model.config='m' has no keys"),
    ],
)
def test_wrong_overrides(words: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read(None, words)
    assert says in str(raised.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ("- a", "holds list at its top"),
        ("training: {steps: 3", "is not YAML at line 1"),
        ("output: " + "a" * 256, "must be a path whose parts have 255 bytes at most"),
        ('output: "a\\0"', "must be a path without zero bytes"),
        ('data: {path: ""}', "data.path='': must be a path that is not empty"),
        ("output: 2026-13-45", "cannot be read: month must be in 1..12; quote what is text"),
        ("[" * 5000, "stand in each other too deeply"),
        ("training:\n  steps: 3\n  steps: 4\n", "at line 3, column 3: key 'steps' is given twice"),
        ("smp_options: 3", "smp_options=3: must be a mapping"),
        ("smp_options: {partitons: 3}", "Did you mean 'partitions'"),
        ("!!python/object:os.system {}", "is not YAML"),
        ("training: {steps: 010}", "line 1, column 19: 010 is a number to the base eight; write 8, or 10 where"),
        (
            "training: {steps: 1:30}",
            "cannot be read at line 1, column 19: 1:30 is a number to the base sixty; write 90",
        ),
        ("optimizer: {learning_rate: 1:30.5}", "1:30.5 is a number to the base sixty; write 90.5, or '1:30.5' where"),
    ],
)
def test_wrong_files(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read(written(tmp_path, text))
    assert says in str(raised.value)


def test_home_directories_in_every_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    keys = ["model.path", "data.path", "data.tokenizer", "data.cache_directory", "checkpoint.resume"]
    keys += ["model.config", "model.weights", "adapter.path", "checkpoint.directory", "launch.cluster", "output"]
    job = load_job(None, dict.fromkeys(keys, "~/place")).model_dump()
    for key in keys:
        section, _, name = key.rpartition(".")
        assert (job[section] if section else job)[name] == str(tmp_path / "place"), key
    written(tmp_path, "training: {steps: 3}").rename(tmp_path / "mine.yaml")
    assert load_job("~/mine.yaml").training.steps == 3


def test_files_that_are_not_there(tmp_path: Path) -> None:
    written(tmp_path, "training: {steps: 3}")
    with pytest.raises(ConfigError, match=r"'.*jobs\.yaml' does not exist\. Did you mean '.*job\.yaml'"):
        read(tmp_path / "jobs.yaml")
    with pytest.raises(ConfigError, match="There is no directory"):
        read(tmp_path / "nowhere" / "job.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        read(tmp_path)
    (tmp_path / "job.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        read(tmp_path / "job.yaml")


def test_overlay_changes_only_what_the_file_sets(tmp_path: Path) -> None:
    job = read({"training": {"steps": 5}, "parallel": {"workers": 4}, "optimizer": {"options": {"eps": 1e-6}}})
    path = written(
        tmp_path, "parallel: {sharded_data_parallel_degree: 1}\noptimizer: {options: {betas: [0.9, 0.99]}}\n"
    )
    other = overlay(job, path).job
    assert other.parallel.sharded_data_parallel_degree == 1
    assert (other.training.steps, other.parallel.workers) == (5, 4)
    assert other.optimizer.options == {"betas": [0.9, 0.99]}  # a value that is a dict is replaced whole


def test_every_key_has_a_description() -> None:
    assert all(info.description for info in leaf_keys().values())
    assert len(leaf_keys()) > 60
