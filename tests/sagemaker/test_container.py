"""The container as SageMaker lays it out: what is read, which variables and arguments come of it, what is left."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest

from shardwise.errors import ConfigError, DataError, MachineError
from shardwise.job.schema import Job
from shardwise.sagemaker.container import CODE_CHANNEL, SOURCE_ARCHIVE, find_container
from shardwise.sagemaker.failure import leave_failure
from tests.sagemaker.layouts import RESOURCES, lay_out


def test_elsewhere_there_is_none(tmp_path: Path) -> None:
    assert find_container({"SAGEMAKER_BASE_DIR": str(tmp_path)}) is None


def test_what_is_no_json_is_named(tmp_path: Path) -> None:
    lay_out(tmp_path, {})
    (tmp_path / "input" / "config" / "hyperparameters.json").write_text("{")
    with pytest.raises(MachineError, match=r"hyperparameters\.json is not the JSON that SageMaker writes"):
        find_container({"SAGEMAKER_BASE_DIR": str(tmp_path)})


def test_hyperparameters_of_the_user_and_of_the_sdk(tmp_path: Path) -> None:
    given = {"training.steps": "30", "lr": '"3e-4"', "raw": "no json", "sagemaker_mpi_enabled": "true"}
    container = lay_out(tmp_path, given)
    assert container.hyperparameters == {"training.steps": 30, "lr": "3e-4", "raw": "no json"}
    assert container.framework == {"sagemaker_mpi_enabled": True} and container.is_distributed


def test_variables_are_those_of_the_toolkit(tmp_path: Path) -> None:
    options = {"tensor_parallel_degree": 2, "bf16": True}
    container = lay_out(tmp_path, {"mp_parameters": options, "a-b": 1, "none": "null"}, ("train",))
    variables = container.variables()
    expected = {
        "SM_HOSTS": '["algo-1","algo-10","algo-2"]',
        "SM_CURRENT_HOST": "algo-2",
        "SM_CURRENT_HOST_RANK": "2",
        "SM_MASTER_ADDR": "algo-1",
        "SM_MODEL_DIR": str(tmp_path / "model"),
        "SM_CHANNEL_TRAIN": str(tmp_path / "input" / "data" / "train"),
        "SM_CHANNELS": '["train"]',
        "SM_HP_MP_PARAMETERS": '{"bf16":true,"tensor_parallel_degree":2}',
        "SM_HP_A-B": "1",
        "SM_HP_A_B": "1",
        "SM_HP_NONE": "",
        "SM_NETWORK_INTERFACE_NAME": "eth0",
        "SM_CURRENT_INSTANCE_TYPE": "ml.p4d.24xlarge",
    }
    assert {name: variables[name] for name in expected} == expected
    assert json.loads(variables["SM_RESOURCE_CONFIG"])["hosts"] == RESOURCES["hosts"]


def test_arguments_in_both_forms(tmp_path: Path) -> None:
    given = {"b": True, "epochs": 3, "mp_parameters": {"y": 2, "x": 1}, "name": '"gpt2"', "none": "null"}
    toolkit = lay_out(tmp_path / "2", given).arguments()
    assert toolkit == ["-b", "True", "--epochs", "3", "--mp_parameters", "x=1,y=2", "--name", "gpt2", "--none", ""]
    newer = lay_out(tmp_path / "3", given | {"sagemaker_argument_form": '"json"'}).arguments()
    assert newer[:6] == ["--b", "true", "--epochs", "3", "--mp_parameters", '{"y": 2, "x": 1}']


def test_only_keys_of_a_job_are_its_hyperparameters(tmp_path: Path) -> None:
    assert lay_out(tmp_path / "1", {"training.steps": 3, "output": '"x"', "mp_parameters": {}}).keys() == {
        "training.steps": 3,
        "output": "x",
    }
    with pytest.raises(ConfigError, match="hyperparameter steps=3 is no key of a job"):
        lay_out(tmp_path / "2", {"steps": 3}).keys()


def archive(**files: str) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as members:
        for name, text in files.items():
            member = tarfile.TarInfo(name.replace("__", "."))
            member.size = len(text)
            members.addfile(member, io.BytesIO(text.encode()))
    return packed.getvalue()


@pytest.mark.parametrize("has_filters", [True, False])
def test_the_code_is_unpacked_and_its_program_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_filters: bool
) -> None:
    if not has_filters:  # Python 3.11.3 and older
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
    container = lay_out(tmp_path, {"sagemaker_program": '"train.py"'}, (CODE_CHANNEL,))
    (tmp_path / "input" / "data" / CODE_CHANNEL / SOURCE_ARCHIVE).write_bytes(archive(train__py="x", other__py="y"))
    assert container.script == tmp_path / "code" / "train.py" and container.job_file is None
    assert (tmp_path / "code" / "other.py").read_text() == "y"


@pytest.mark.parametrize("has_filters", [True, False])
def test_code_is_not_unpacked_outside_of_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_filters: bool
) -> None:
    if not has_filters:
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
    container = lay_out(tmp_path, {"sagemaker_program": '"train.py"'}, (CODE_CHANNEL,))
    outside = archive(**{"../outside__py": "x"})
    (tmp_path / "input" / "data" / CODE_CHANNEL / SOURCE_ARCHIVE).write_bytes(outside)
    with pytest.raises(DataError, match="cannot be unpacked"):
        _ = container.script
    assert not (tmp_path / "outside.py").exists()


def test_a_program_may_be_a_job(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "job.yaml").write_text("training: {steps: 2}")
    container = lay_out(tmp_path, {"sagemaker_program": "job.yaml"})
    assert container.script is None and container.job_file == tmp_path / "code" / "job.yaml"


def test_a_program_that_is_not_there_names_what_is(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "main.py").touch()
    with pytest.raises(ConfigError, match=r"sagemaker_program='train\.py' is not in .*code; there are main\.py"):
        _ = lay_out(tmp_path, {"sagemaker_program": "train.py"}).script


def test_the_job_of_its_channel(tmp_path: Path) -> None:
    container = lay_out(tmp_path, {}, ("job",))
    assert container.job_file is None
    (tmp_path / "input" / "data" / "job" / "mine.yaml").touch()
    assert container.job_file == tmp_path / "input" / "data" / "job" / "mine.yaml"
    (tmp_path / "input" / "data" / "job" / "other.json").touch()
    with pytest.raises(ConfigError, match=r"channel job holds mine\.yaml, other\.json; give it one file"):
        _ = container.job_file


def test_outputs_go_where_the_service_looks(tmp_path: Path) -> None:
    container = lay_out(tmp_path / "one", {}, hosts=["algo-1"], current_host="algo-1")
    assert container.placed(Job())[0].output == str(tmp_path / "one" / "output" / "data")
    assert container.placed(Job(output="mine"))[0].output == "mine"
    (tmp_path / "one" / "checkpoints").mkdir()
    job, notes = container.placed(Job())
    assert (job.checkpoint.directory, job.checkpoint.resume) == (str(tmp_path / "one" / "checkpoints"), "auto")
    assert notes == []
    other = lay_out(tmp_path / "two", {"sagemaker_checkpoint_local_path": '"/opt/ml/kept/here"'}, hosts=["algo-1"])
    (tmp_path / "two" / "kept" / "here").mkdir(parents=True)
    assert other.placed(Job())[0].checkpoint.directory == str(tmp_path / "two" / "kept" / "here")
    given = Job.model_validate({"checkpoint": {"directory": "s3://bucket/run", "resume": "none"}})
    assert container.placed(given)[0].checkpoint == given.checkpoint


def test_directories_of_several_hosts_keep_no_checkpoints(tmp_path: Path) -> None:
    container = lay_out(tmp_path, {})
    (tmp_path / "checkpoints").mkdir()
    job, notes = container.placed(Job())
    assert job.checkpoint.directory is None and "another directory on each of 3 hosts" in notes[0]


def test_the_model_is_moved_to_its_place(tmp_path: Path) -> None:
    container = lay_out(tmp_path, {})
    output = tmp_path / "output" / "data"
    for name in ("model/config.json", "adapter/adapter_config.json"):
        (output / name).parent.mkdir(parents=True)
        (output / name).touch()
    assert "which the service uploads" in str(container.keep_model(output, ("model", "adapter")))
    moved = sorted(path.relative_to(tmp_path).as_posix() for path in (tmp_path / "model").rglob("*.json"))
    assert moved == ["model/adapter/adapter_config.json", "model/config.json"] and list(output.iterdir()) == []
    assert container.keep_model(output, ("model", "adapter")) is None


def test_the_first_failure_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(tmp_path))
    leave_failure("nobody listens")
    assert not (tmp_path / "output").exists()
    lay_out(tmp_path, {})
    leave_failure("the cause")
    leave_failure("what came of it")
    assert (tmp_path / "output" / "failure").read_text() == "the cause"
