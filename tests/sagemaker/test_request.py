"""The body of CreateTrainingJob: what the service's own model takes, and what is refused before it is sent."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from shardwise.errors import ConfigError
from shardwise.job.secret_forms import is_secret
from shardwise.sagemaker.request import TrainingJob, proper_name, training_request
from shardwise.sagemaker.shapes import (
    Channel,
    DataSource,
    FileSystemDataSource,
    InstanceGroup,
    OutputDataConfig,
    S3DataSource,
)

JOB = TrainingJob(
    name="gpt-2026",
    role="arn:aws:iam::123456789012:role/train",
    image="123456789012.dkr.ecr.us-east-1.amazonaws.com/shardwise:0.2",
    output_path="s3://bucket/out",
    instance_type="ml.p5.48xlarge",
    instance_count=2,
)
EVERYTHING = replace(
    JOB,
    hyperparameters={"training.steps": 30, "model": "gpt2", "flag": True},
    encoded={"mp_parameters": "{}"},
    environment={"NCCL_DEBUG": "WARN"},
    channels=[
        Channel(
            channel_name="train",
            data_source=DataSource(s3_data_source=S3DataSource(s3_uri="s3://bucket/train")),
            input_mode="FastFile",
        ),
        Channel(
            channel_name="fsx",
            data_source=DataSource(
                file_system_data_source=FileSystemDataSource(
                    file_system_id="fs-0123456789", file_system_type="FSxLustre", directory_path="/fsx"
                )
            ),
        ),
    ],
    metrics={"train:loss": "loss ([0-9.]+)"},
    checkpoint_uri="s3://bucket/checkpoints",
    spot=True,
    max_run=100,
    max_wait=200,
    tags={"team": "language"},
    entrypoint=["shardwise", "train"],
    output_compression="NONE",
    keep_alive_seconds=60,
    more={"RetryStrategy": {"MaximumRetryAttempts": 2}, "VpcConfig": {"SecurityGroupIds": ["sg"], "Subnets": ["s"]}},
)


def complaints(request: dict[str, Any]) -> str:
    """What botocore finds wrong with a request, by the service's model."""
    loaders = pytest.importorskip("botocore.loaders")
    model = pytest.importorskip("botocore.model")
    validate = pytest.importorskip("botocore.validate")
    service = model.ServiceModel(loaders.Loader().load_service_model("sagemaker", "service-2"))
    shape = service.operation_model("CreateTrainingJob").input_shape
    return str(validate.ParamValidator().validate(request, shape).generate_report())


def test_the_service_takes_every_member() -> None:
    groups = replace(
        EVERYTHING,
        instance_groups=[InstanceGroup(instance_type="ml.p4d.24xlarge", instance_count=1, instance_group_name="a")],
    )
    assert complaints(training_request(EVERYTHING)) == ""
    assert complaints(training_request(groups)) == ""
    assert complaints({"TrainingJobName": "x"}) != ""


def test_what_is_not_set_is_left_out() -> None:
    assert training_request(JOB) == {
        "TrainingJobName": "gpt-2026",
        "AlgorithmSpecification": {"TrainingImage": JOB.image, "TrainingInputMode": "File"},
        "RoleArn": JOB.role,
        "OutputDataConfig": {"S3OutputPath": "s3://bucket/out"},
        "ResourceConfig": {"InstanceType": "ml.p5.48xlarge", "InstanceCount": 2, "VolumeSizeInGB": 30},
        "StoppingCondition": {"MaxRuntimeInSeconds": 86_400},
    }


def test_hyperparameters_travel_as_json_text() -> None:
    sent = training_request(EVERYTHING)["HyperParameters"]
    assert sent == {"training.steps": "30", "model": '"gpt2"', "flag": "true", "mp_parameters": "{}"}
    assert json.loads(sent["model"]) == "gpt2"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "a_b"}, "job name 'a_b': .* use 'a-b'"),
        ({"name": "a" * 64}, "at most 63"),
        ({"instance_type": None}, "instance_type is not given"),
        ({"instance_count": 0}, "instance_count=0"),
        ({"checkpoint_path": "/opt/ml/own"}, "checkpoints '/opt/ml/own' is kept at no place in S3"),
        ({"max_wait": 5}, "max_wait=5 is for spot instances"),
        ({"spot": True, "max_wait": 5, "max_run": 6}, "use max_wait=6 or more"),
        ({"hyperparameters": {"x": "y" * 2500}}, "hyperparameter 'x' has 2502 characters"),
        ({"hyperparameters": dict.fromkeys(map(str, range(101)), 1)}, "101 are given, SageMaker takes 100"),
        ({"environment": {"A-B": "1"}}, "environment 'A-B'"),
        ({"tags": dict.fromkeys(map(str, range(51)), "1")}, "tags: 51 are given"),
        ({"environment": {"HF_TOKEN": "hf_abcdefghijklmnopqrstuvwx"}}, "HF_TOKEN looks like a secret"),
    ],
)
def test_what_the_service_would_refuse_is_refused_first(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        training_request(replace(JOB, **change))


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("HF_TOKEN", "hf_abcdefghijklmnopqrstuvwx", True),
        ("anything", "see AKIAIOSFODNN7EXAMPLE", True),
        ("DB_PASSWORD", "correct-horse", True),
        ("apiKey", "0123456789", True),
        ("HF_TOKEN", "arn:aws:secretsmanager:us-east-1:1:secret:hf", False),
        ("WANDB_API_KEY_FILE", "/opt/ml/input/data/keys/wandb", False),
        ("pad_token", "<|endoftext|>", False),
        ("TOKENIZERS_PARALLELISM", "false", False),
        ("training.tokens_per_step", 1_000_000, False),
        ("max_tokens", "100000000", False),
    ],
)
def test_secrets(name: str, value: Any, expected: bool) -> None:
    assert is_secret(name, value) is expected


def test_a_refused_secret_is_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        training_request(replace(JOB, environment={"DB_PASSWORD": "correct-horse"}))
    assert "correct-horse" not in str(caught.value)


def test_names_are_made_to_fit() -> None:
    assert proper_name("my model/v2") == "my-model-v2"
    assert proper_name("x" * 80, "-2026") == "x" * 58 + "-2026"
    assert proper_name("___") == "shardwise"


def test_an_unknown_argument_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"OutputDataConfig: unknown argument s3_output\. Did you mean"):
        OutputDataConfig(s3_output="s3://x")
    with pytest.raises(ConfigError, match="S3DataSource: s3_uri is not given"):
        S3DataSource()
