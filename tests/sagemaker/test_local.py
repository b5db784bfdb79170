"""Jobs on this machine, laid out and started as SageMaker would: scripts, commands, jobs, one host and two."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import ConfigError, WorkerError
from shardwise.errors.exit_codes import STOPPED
from shardwise.sagemaker import Compute, Mode, ModelTrainer, PyTorch, SourceCode, local
from shardwise.sagemaker.client import ServiceClient
from shardwise.sagemaker.inputs import TrainingInput
from shardwise.sagemaker.local import LocalRun, run_in_place
from tests.sagemaker.made_service import MadeSession

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


# A host without any Python of its own: what it was given, and a model.
HOST = """
echo "$SHARDWISE_HOST of $TRAINING_JOB_NAME at $MASTER_ADDR, ranks ${RANK-unset}, devices <$CUDA_VISIBLE_DEVICES>"
cat input/data/train/rows.txt > model/rows.txt
cp input/config/resourceconfig.json "model/$SHARDWISE_HOST.json"
"""


def run_shell(here: Path, script: str, said: list[str] | None = None, inputs: Any = None, **arguments: Any) -> LocalRun:
    """Run hosts whose entry point is a script of the shell."""
    made = estimator(here, container_entry_point=["sh", "-c", script], **arguments)
    draft = made.draft({"train": str(here / "data")} if inputs is None else inputs, "run")
    say = (lambda text: None) if said is None else said.append
    return run_in_place(draft, here / "root", ServiceClient(MadeSession()), say, with_logs=said is not None)


def test_hosts_are_laid_out_and_packed_as_the_service_does(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")  # of whoever calls; no business of the hosts
    said: list[str] = []
    run = run_shell(here, HOST, said, instance_count=2)
    assert sorted(said) == [
        f"algo-{number} | algo-{number} of run at 127.0.0.1, ranks unset, devices <>" for number in (1, 2)
    ]
    model = members(run.model_data)
    assert sorted(model) == ["algo-1.json", "algo-2.json", "rows.txt"] and model["rows.txt"] == b"some rows"
    assert json.loads(model["algo-2.json"])["hosts"] == ["algo-1", "algo-2"]
    assert (run.output_data, run.stopped, run.directory) == (None, False, here / "root" / "run")
    config = json.loads((run.directory / "algo-1" / "input" / "config" / "inputdataconfig.json").read_text())
    assert config["train"] == {
        "TrainingInputMode": "File", "S3DistributionType": "FullyReplicated", "RecordWrapperType": "None"
    }  # fmt: skip
    parameters = json.loads((run.directory / "algo-1" / "input" / "config" / "hyperparameters.json").read_text())
    assert parameters["epochs"] == "3" and json.loads(parameters["sagemaker_job_name"]) == "run"
    with tarfile.open(run.directory / "algo-2" / "input" / "data" / "code" / "sourcedir.tar.gz") as source:
        assert source.getnames() == ["train.py"]


def test_a_file_and_checkpoints_of_this_machine_are_in_their_places(here: Path) -> None:
    script = "cat input/data/train/rows.txt > checkpoints/seen.txt; echo said > output/data/notes.txt"
    inputs = {"train": str(here / "data" / "rows.txt")}
    run = run_shell(
        here, script, inputs=inputs, checkpoint_s3_uri=(here / "kept").as_uri(), output_path=(here / "out").as_uri()
    )
    assert (here / "kept" / "seen.txt").read_text() == "some rows"
    assert run.model_data is None and members(run.output_data) == {"notes.txt": b"said\n"}
    assert run.output_data == (here / "out" / "output.tar.gz").as_uri()


def test_checkpoints_of_another_path_are_there_and_the_container_knows(here: Path) -> None:
    script = "echo 1 > own/kept/seen.txt; cp input/config/hyperparameters.json output/data/said"
    kept = {"checkpoint_s3_uri": (here / "kept").as_uri(), "checkpoint_local_path": "/opt/ml/own/kept"}
    run = run_shell(here, script, **kept)
    assert (here / "kept" / "seen.txt").is_file()
    said = json.loads(members(run.output_data)["said"])
    assert said["sagemaker_checkpoint_local_path"] == '"/opt/ml/own/kept"'
    with pytest.raises(ConfigError, match="'/kept' lies outside of /opt/ml"):
        run_shell(here, script, **kept | {"checkpoint_local_path": "/kept"})


def test_a_checkpoint_prefix_of_s3_is_an_empty_directory(here: Path) -> None:
    run = run_shell(here, "ls -A checkpoints | wc -l > model/count", checkpoint_s3_uri="s3://bucket/kept")
    assert members(run.model_data) == {"count": b"0\n"}
    assert run.model_data == (here / "root" / "run" / "artifacts" / "model.tar.gz").as_uri()


def test_a_stopped_host_is_no_failure(here: Path) -> None:
    assert run_shell(here, f"exit {STOPPED}").stopped


def test_a_failed_host_ends_the_others_and_says_why(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "GRACE_SECONDS", 0.0)
    script = """
    if [ "$SHARDWISE_HOST" = algo-1 ]; then exec sleep 600; fi
    mkdir -p output; echo "RuntimeError: no epochs" > output/failure; exit 7
    """
    with pytest.raises(WorkerError) as caught:
        run_shell(here, script, instance_count=2)
    first, second = str(caught.value).strip().splitlines()
    assert first == "algo-1 ended with exit code -15: no reason was left"
    assert second == "algo-2 ended with exit code 7: RuntimeError: no epochs"
    assert caught.value.exit_code == 7


def test_a_host_that_does_not_heed_sigterm_is_killed(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "GRACE_SECONDS", 0.0)
    monkeypatch.setattr(local, "STOP_SECONDS", 0.1)
    waiting = "trap '' TERM; touch ../deaf; while :; do sleep 0.1; done"
    script = (
        f'if [ "$SHARDWISE_HOST" = algo-1 ]; then {waiting}; fi; while [ ! -e ../deaf ]; do sleep 0.02; done; exit 7'
    )
    with pytest.raises(WorkerError, match="algo-1 ended with exit code -9"):
        run_shell(here, script, instance_count=2)


@pytest.mark.parametrize(
    ("arguments", "inputs", "message"),
    [
        ({"input_mode": "Pipe"}, {"train": "s3://bucket/x"}, "input 'train': this machine has no such"),
        ({}, {"code": "data"}, "input 'code'"),
        (
            {},
            {"train": TrainingInput("s3://bucket/x", distribution="ShardedByS3Key")},
            "ShardedByS3Key is the service's",
        ),
    ],
)
def test_what_only_the_service_has_is_refused(
    here: Path, arguments: dict[str, object], inputs: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        estimator(here, **arguments).fit(inputs)
