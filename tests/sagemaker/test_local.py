"""Jobs on this machine, laid out and started as SageMaker would: scripts, commands, jobs, one host and two."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from shardwise.errors import ConfigError, WorkerError
from shardwise.sagemaker import Compute, Mode, ModelTrainer, PyTorch, SourceCode

SCRIPT = """
import argparse, json, os, sys
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int)
parser.add_argument("--mp_parameters")
parser.add_argument("--model-dir", default=os.environ["SM_MODEL_DIR"])
options = parser.parse_args()
rank = os.environ["RANK"]
known = {name: os.environ[name] for name in ("WORLD_SIZE", "SM_CURRENT_HOST", "SM_HOSTS", "SM_CHANNEL_TRAIN")}
known["rows"] = open(os.path.join(os.environ["SM_CHANNEL_TRAIN"], "rows.txt")).read()
known["epochs"], known["options"] = options.epochs, options.mp_parameters
print("script speaks", rank, flush=True)
with open(os.path.join(options.model_dir, f"rank-{rank}.json"), "w") as file:
    json.dump(known, file)
if options.epochs == 0:
    raise RuntimeError("no epochs")
"""
JOB = """
model: {config: {model_type: gpt2, n_layer: 2, n_embd: 16, n_head: 2, n_positions: 32}}
training: {steps: 2, sequences_per_step: 4, evaluate_batches: 1}
data: {path: corpus.txt, sequence_length: 16, vocabulary_size: 300}
observe: {tensorboard: false, sample: false}
checkpoint: {every: 1}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "train.py").write_text(SCRIPT)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.txt").write_text("some rows")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def members(archive: str | None) -> dict[str, bytes]:
    """What an archive holds."""
    assert archive is not None
    with tarfile.open(archive.removeprefix("file://")) as packed:
        return {name: packed.extractfile(name).read() for name in packed.getnames()}  # type: ignore[union-attr]


def estimator(here: Path, **arguments: object) -> PyTorch:
    given: dict[str, object] = {"instance_type": "local", "instance_count": 1, "hyperparameters": {"epochs": 3}}
    return PyTorch("train.py", source_dir=str(here / "source"), **(given | arguments))


@pytest.mark.slow  # each host imports torch, and each of its workers
@pytest.mark.parametrize("hosts", [1, 2])
def test_a_script_runs_on_the_ranks_of_its_hosts(here: Path, hosts: int, capsys: pytest.CaptureFixture[str]) -> None:
    distribution = {
        "mpi": {"enabled": True, "processes_per_host": 2},
        "smdistributed": {"modelparallel": {"enabled": True, "parameters": {"microbatches": 2}}},
    }
    made = estimator(here, instance_count=hosts, distribution=distribution, output_path=(here / "out").as_uri())
    made.fit({"train": str(here / "data")}, job_name="run")
    assert made.model_data == (here / "out" / "model.tar.gz").as_uri()
    said = {name: json.loads(text) for name, text in members(made.model_data).items()}
    assert sorted(said) == [f"rank-{rank}.json" for rank in range(2 * hosts)]
    last = said[f"rank-{2 * hosts - 1}.json"]
    assert last["WORLD_SIZE"] == str(2 * hosts) and last["SM_CURRENT_HOST"] == f"algo-{hosts}"
    assert (last["rows"], last["epochs"], last["options"]) == ("some rows", 3, "microbatches=2")
    assert "algo-1 | script speaks 0" in capsys.readouterr().out


@pytest.mark.slow
def test_a_job_runs_and_leaves_model_and_checkpoints(here: Path) -> None:
    (here / "source" / "job.yaml").write_text(JOB)
    (here / "source" / "corpus.txt").write_text("all work and no play makes jack a dull boy\n" * 300)
    made = PyTorch(
        "job.yaml", source_dir=str(here / "source"), instance_type="local", instance_count=1,
        hyperparameters={"training.steps": 1}, checkpoint_s3_uri=(here / "checkpoints").as_uri(),
    )  # fmt: skip
    made.fit(job_name="one")
    assert "config.json" in members(made.model_data)
    assert (here / "checkpoints" / "step-1").is_dir() or list((here / "checkpoints").iterdir())
    made.set_hyperparameters(**{"training.steps": 2})
    made.fit(job_name="two")  # goes on from the first one's checkpoint
    output = members(made.latest_training_job.run.output_data)  # type: ignore[union-attr]
    steps = [json.loads(line)["step"] for line in output["metrics.jsonl"].splitlines()]
    assert 1 not in steps and 2 in steps


@pytest.mark.slow
def test_a_failure_has_its_reason_and_exit_code(here: Path) -> None:
    with pytest.raises(WorkerError, match=r"(?s)algo-1 ended with exit code 200: .*RuntimeError: no epochs") as caught:
        estimator(here, hyperparameters={"epochs": 0}).fit({"train": str(here / "data")}, logs=False)
    assert caught.value.exit_code == 200


@pytest.mark.slow
def test_a_trainer_runs_its_command_here(here: Path) -> None:
    trainer = ModelTrainer(
        training_mode=Mode.LOCAL_CONTAINER,
        source_code=SourceCode(source_dir=str(here / "source"), command="echo $SM_HP_EPOCHS > $SM_MODEL_DIR/epochs"),
        compute=Compute(instance_type="local_cpu", instance_count=1),
        hyperparameters={"epochs": 4},
        local_container_root=str(here / "root"),
    )
    trainer.train(logs=False)
    assert members(trainer.latest_training_job.model_data) == {"epochs": b"4\n"}


@pytest.mark.parametrize(
    ("arguments", "inputs", "message"),
    [
        ({"input_mode": "Pipe"}, {"train": "s3://bucket/x"}, "input 'train': this machine has no such"),
        ({}, {"code": "data"}, "input 'code'"),
    ],
)
def test_what_only_the_service_has_is_refused(
    here: Path, arguments: dict[str, object], inputs: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        estimator(here, **arguments).fit(inputs)
