"""The trainer of version 3: what its arguments come to, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import ConfigError, LegalityError
from shardwise.sagemaker import (
    MPI,
    SMP,
    CheckpointConfig,
    Compute,
    InputData,
    MetricDefinition,
    ModelTrainer,
    Networking,
    OutputDataConfig,
    RetryStrategy,
    S3DataSource,
    SourceCode,
    StoppingCondition,
    Tag,
    Torchrun,
)
from tests.sagemaker.test_request import complaints

ROLE = "arn:aws:iam::123456789012:role/train"
IMAGE = "123456789012.dkr.ecr.us-east-1.amazonaws.com/shardwise:0.2"
COMPUTE = Compute(instance_type="ml.p5.48xlarge", instance_count=2)


@pytest.fixture
def source(tmp_path: Path) -> str:
    (tmp_path / "train.py").write_text("print('hello')\n")
    return str(tmp_path)


def trainer(source: str, **arguments: Any) -> ModelTrainer:
    code = SourceCode(source_dir=source, entry_script="train.py")
    return ModelTrainer(**{"training_image": IMAGE, "role": ROLE, "source_code": code, "compute": COMPUTE} | arguments)


def test_the_request_of_a_usual_trainer(source: str) -> None:
    made = trainer(
        source,
        distributed=Torchrun(process_count_per_node=4, smp=SMP(tensor_parallel_degree=2, random_seed=1)),
        hyperparameters={"epochs": 3, "flag": True},
        networking=Networking(subnets=["s"], security_group_ids=["g"], enable_network_isolation=True),
        stopping_condition=StoppingCondition(max_runtime_in_seconds=10),
        output_data_config=OutputDataConfig(s3_output_path="s3://bucket/out", compression_type="NONE"),
        checkpoint_config=CheckpointConfig(s3_uri="s3://bucket/checkpoints"),
        tags=[Tag(key="a", value="b")],
        input_data_config=[InputData(channel_name="train", data_source="s3://bucket/old")],
    )
    made.with_retry_strategy(RetryStrategy(maximum_retry_attempts=3)).with_remote_debug_config()
    made.with_metric_definitions([MetricDefinition(name="loss", regex="loss ([0-9.]+)")])
    source_of_data = S3DataSource(s3_uri="s3://bucket/new", s3_data_type="S3Prefix")
    request = made.train([InputData(channel_name="train", data_source=source_of_data)], dry_run=True)
    assert request is not None and complaints(request) == ""
    parameters = request["HyperParameters"]
    assert json.loads(parameters["mp_parameters"]) == {"tensor_parallel_degree": 2, "random_seed": 1}
    assert (parameters["flag"], parameters["sagemaker_argument_form"]) == ("true", '"json"')
    assert parameters["sagemaker_mpi_num_of_processes_per_host"] == "4"
    uris = [channel["DataSource"]["S3DataSource"]["S3Uri"] for channel in request["InputDataConfig"]]
    assert uris[0] == "s3://bucket/new" and uris[1].endswith("/source/sourcedir.tar.gz")
    assert request["RetryStrategy"] == {"MaximumRetryAttempts": 3} and request["EnableNetworkIsolation"] is True
    assert request["AlgorithmSpecification"]["MetricDefinitions"] == [{"Name": "loss", "Regex": "loss ([0-9.]+)"}]
    assert request["OutputDataConfig"] == {"S3OutputPath": "s3://bucket/out", "CompressionType": "NONE"}


def test_a_command_wins(source: str) -> None:
    code = SourceCode(source_dir=source, command="python train.py", requirements="more.txt")
    draft = trainer(source, source_code=code, distributed=Torchrun(process_count_per_node=2)).draft()
    assert "distributed has no effect here: source_code.command says what runs." in draft.check()
    parameters = draft.request()["HyperParameters"]
    assert parameters["sagemaker_command"] == '"python train.py"' and "sagemaker_program" not in parameters
    assert parameters["sagemaker_requirements"] == '"more.txt"'


def test_options_of_mpirun_that_are_variables(source: str) -> None:
    draft = trainer(source, distributed=MPI(mpi_additional_options=["-np", "16", "-x", "A=1"])).draft()
    assert any("-np 16 has no effect here" in note for note in draft.check())
    assert draft.request()["Environment"] == {"A": "1"}
    assert draft.request()["HyperParameters"]["sagemaker_mpi_enabled"] == "true"


def test_hyperparameters_of_a_file(source: str, tmp_path: Path) -> None:
    (tmp_path / "given.yaml").write_text("training.steps: 3\n")
    draft = trainer(source, hyperparameters=str(tmp_path / "given.yaml")).draft()
    assert draft.request()["HyperParameters"]["training.steps"] == "3"
    with pytest.raises(ConfigError, match=r"hyperparameters='none\.json' is no file"):
        trainer(source, hyperparameters="none.json").draft()


def test_options_are_checked_for_the_instances_of_a_trainer(source: str) -> None:
    with pytest.raises(LegalityError, match="tensor_parallel_degree=5 on 2 x 8 ranks"):
        trainer(source, distributed=Torchrun(smp=SMP(tensor_parallel_degree=5))).train()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"algorithm_name": "x", "training_image": None}, "algorithm_name='x'"),
        ({"source_code": None}, "give SourceCode"),
        ({"source_code": SourceCode(entry_script="train.sql")}, "must end in"),
        ({"source_code": SourceCode(entry_script="train.py", requirements="auto")}, "JumpStart"),
        ({"role": None}, "role is not given"),
        ({"training_image": None}, "training_image is not given; Amazon's images"),
        ({"model_package_config": {}}, "model_package_config"),
    ],
)
def test_what_a_trainer_refuses(source: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer(source, **arguments).train(dry_run=True)


def test_unknown_arguments_and_recipes_are_named(source: str) -> None:
    with pytest.raises(ConfigError, match=r"Compute: unknown argument instance_typ\. Did you mean 'instance_type'"):
        Compute(instance_typ="x")
    with pytest.raises(ConfigError, match="use `shardwise recipe RECIPE --to sagemaker`"):
        ModelTrainer.from_recipe("training/llama/x")
