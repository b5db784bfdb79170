"""Calls of SageMaker's own SDKs, really installed, and the same calls with the import changed: equal requests.

Each SDK is installed into an environment of its own, since both are called `sagemaker`; where pip cannot, that is said.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import shardwise.sagemaker
from tests.sagemaker import sdk_requests

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
PACKAGES = {"2": "sagemaker<3", "3": "sagemaker-train"}
ROLE = "arn:aws:iam::123456789012:role/train"
IMAGE = "123456789012.dkr.ecr.us-east-1.amazonaws.com/shardwise:0.2"
QUIET = "SchemaVersion: '1.0'\nSageMaker: {PythonSDK: {Modules: {TelemetryOptOut: true}}}\n"
SMP_OPTIONS = {"tensor_parallel_degree": 2, "hybrid_shard_degree": 4}


def distribution(parameters: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {"smdistributed": {"modelparallel": {"enabled": True, "parameters": parameters}}, **others}


USUAL: dict[str, Any] = {
    "entry_point": "train.py", "source_dir": "src", "role": ROLE, "image_uri": IMAGE, "instance_count": 2,
    "instance_type": "ml.p4d.24xlarge", "framework_version": "2.5.1", "py_version": "py311", "disable_profiler": True,
    "debugger_hook_config": False, "output_path": "s3://bucket/out",
    "metric_definitions": [{"Name": "loss", "Regex": "loss ([0-9.]+)"}],
}  # fmt: skip
ESTIMATORS: dict[str, dict[str, Any]] = {
    "SMP's version 2": {
        "distribution": distribution(SMP_OPTIONS, torch_distributed={"enabled": True}),
        "hyperparameters": {"epochs": 3, "name": "a", "flag": True, "rate": 1e-4, "list": [1, 2]},
    },
    "SMP's version 1": {
        "distribution": distribution(
            {"pipeline_parallel_degree": 2, "partitions": 2, "microbatches": 4, "ddp": True},
            mpi={"enabled": True, "processes_per_host": 8, "custom_mpi_options": "-x NCCL_DEBUG=WARN"},
        ),
    },
    "torchrun": {"distribution": {"torch_distributed": {"enabled": True}}, "volume_size": 100, "max_run": 3600},
    "everything beside": {
        "use_spot_instances": True, "max_wait": 90_000, "checkpoint_s3_uri": "s3://bucket/checkpoints",
        "tags": [{"Key": "team", "Value": "a"}], "subnets": ["subnet-1"], "security_group_ids": ["sg-1"],
        "environment": {"A": "1"}, "max_retry_attempts": 2, "input_mode": "FastFile",
        "encrypt_inter_container_traffic": True, "enable_network_isolation": True, "volume_kms_key": "key",
        "output_kms_key": "key", "keep_alive_period_in_seconds": 60, "enable_remote_debug": True,
        "disable_output_compression": True, "container_log_level": 10,
    },
}  # fmt: skip
OF_MPIRUN = {"SMP's version 1": {"NCCL_DEBUG": "WARN"}}  # its options that are variables become the job's
INPUTS: dict[str, Any] = {
    "train": "s3://bucket/train",
    "rows": {
        "kind": "TrainingInput", "s3_data": "s3://bucket/rows", "distribution": "ShardedByS3Key",
        "input_mode": "FastFile", "content_type": "text/plain",
    },
    "fsx": {
        "kind": "FileSystemInput", "file_system_id": "fs-1", "file_system_type": "FSxLustre",
        "directory_path": "/fsx/a",
    },
}  # fmt: skip
TRAINER: dict[str, Any] = {
    "training_image": IMAGE, "role": ROLE, "base_job_name": "job",
    "source_code": {"kind": "SourceCode", "source_dir": "src", "entry_script": "train.py"},
    "compute": {
        "kind": "Compute", "instance_type": "ml.p5.48xlarge", "instance_count": 2, "volume_size_in_gb": 50,
        "enable_managed_spot_training": True,
    },
    "distributed": {
        "kind": "Torchrun", "process_count_per_node": 8,
        "smp": {"kind": "SMP", "tensor_parallel_degree": 2, "hybrid_shard_degree": 8},
    },
    "hyperparameters": {"epochs": 3, "flag": True, "name": "a", "list": [1, 2]},
    "networking": {"kind": "Networking", "subnets": ["subnet-1"], "security_group_ids": ["sg-1"]},
    "stopping_condition": {
        "kind": "StoppingCondition", "max_runtime_in_seconds": 600, "max_wait_time_in_seconds": 900,
    },
    "output_data_config": {"kind": "OutputDataConfig", "s3_output_path": "s3://bucket/out", "compression_type": "NONE"},
    "checkpoint_config": {"kind": "CheckpointConfig", "s3_uri": "s3://bucket/checkpoints"},
    "environment": {"A": "1"},
    "tags": [{"kind": "Tag", "key": "team", "value": "a"}],
}  # fmt: skip
TRAINERS_INPUTS = [
    {"kind": "InputData", "channel_name": "train", "data_source": "s3://bucket/train"},
    {
        "kind": "InputData", "channel_name": "fsx",
        "data_source": {
            "kind": "FileSystemDataSource", "file_system_id": "fs-1", "file_system_access_mode": "ro",
            "file_system_type": "FSxLustre", "directory_path": "/fsx/a",
        },
    },
]  # fmt: skip
METRICS = [{"name": "loss", "regex": "loss ([0-9.]+)"}]
KINDS = [
    "SourceCode", "Compute", "Torchrun", "SMP", "Networking", "StoppingCondition", "OutputDataConfig",
    "CheckpointConfig", "Tag", "InputData", "FileSystemDataSource",
]  # fmt: skip


@pytest.fixture(scope="module")
def sdk(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[str]:
    """Return the words that ask an SDK of a version for a request; SHARDWISE_SDK_2 and _3 name a Python that has it."""
    version: str = request.param
    python = os.environ.get(f"SHARDWISE_SDK_{version}")
    if python is None:
        place = tmp_path_factory.mktemp(f"sdk-{version}")
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
        python = str(place / "bin" / "python")
        done = subprocess.run([python, "-m", "pip", "install", "-q", PACKAGES[version]], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"pip cannot install {PACKAGES[version]}: {done.stderr.strip().splitlines()[-1]}")
    return [python, str(Path(sdk_requests.__file__)), version]


# Where the code lies, and what an SDK tells its own container of starts that ours does not have.
TO_OWN_CONTAINER = (
    "sagemaker_submit_directory", "sagemaker_region", "sagemaker_job_name", "sagemaker_instance_type",
    "sagemaker_distributed_dataparallel_enabled", "sagemaker_mpi_custom_mpi_options",
)  # fmt: skip


def theirs(sdk: list[str], call: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Return the request that an SDK makes of a call, where `src/train.py` lies in the directory."""
    (directory / "src").mkdir()
    (directory / "src" / "train.py").write_text("print('hello')\n")
    (directory / "config.yaml").write_text(QUIET)
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    variables["SAGEMAKER_USER_CONFIG_OVERRIDE"] = str(directory / "config.yaml")
    done = subprocess.run(sdk, input=json.dumps(call), cwd=directory, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    request: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return request


def common(request: dict[str, Any]) -> dict[str, Any]:
    """Return what both have to say alike: no managed channels, start, or words of the SDK to its own container."""
    kept = {name: value for name, value in request.items() if name not in ("TrainingJobName", "ProfilerConfig")}
    of_start = ("ContainerEntrypoint", "ContainerArguments", "EnableSageMakerMetricsTimeSeries")
    algorithm = {name: value for name, value in request["AlgorithmSpecification"].items() if name not in of_start}
    channels = {channel["ChannelName"]: channel for channel in request["InputDataConfig"]}
    for channel in channels.values():
        channel.setdefault("InputMode", request["AlgorithmSpecification"]["TrainingInputMode"])
    if "CheckpointConfig" in kept:
        kept["CheckpointConfig"].setdefault("LocalPath", "/opt/ml/checkpoints")
    hyperparameters = {name: decoded(value) for name, value in request["HyperParameters"].items()}
    return kept | {
        "AlgorithmSpecification": algorithm,
        "InputDataConfig": {name: each for name, each in channels.items() if name not in ("code", "sm_drivers")},
        "HyperParameters": {name: value for name, value in hyperparameters.items() if name not in TO_OWN_CONTAINER},
    }


def decoded(value: str) -> Any:
    """Return a hyperparameter; version 3 sends strings bare, and nested JSON as text."""
    try:
        read = json.loads(value)
    except ValueError:
        return value
    return decoded(read) if isinstance(read, str) and read.startswith("{") else read


@pytest.mark.parametrize("sdk", ["2"], indirect=True)
@pytest.mark.parametrize("case", ESTIMATORS)
def test_estimators_make_the_sdks_requests(
    sdk: list[str], case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = USUAL | ESTIMATORS[case]
    expected = common(theirs(sdk, {"arguments": arguments, "inputs": INPUTS}, tmp_path))
    monkeypatch.chdir(tmp_path)
    kinds = {name: getattr(shardwise.sagemaker, name) for name in ("TrainingInput", "FileSystemInput")}
    inputs = {name: sdk_requests.made_of(value, kinds) for name, value in INPUTS.items()}
    draft = shardwise.sagemaker.PyTorch(**arguments).draft(inputs, "job")
    draft.check()
    request = common(draft.request("s3://bucket"))
    assert request.pop("Environment", {}) == expected.pop("Environment", {}) | OF_MPIRUN.get(case, {})
    assert request == expected


@pytest.mark.parametrize("sdk", ["3"], indirect=True)
def test_trainers_make_the_sdks_request(sdk: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call = {"arguments": TRAINER, "inputs": TRAINERS_INPUTS, "metrics": METRICS, "kinds": KINDS}
    expected = common(theirs(sdk, call, tmp_path))
    monkeypatch.chdir(tmp_path)
    kinds = {name: getattr(shardwise.sagemaker, name) for name in KINDS}
    arguments = {name: sdk_requests.made_of(value, kinds) for name, value in TRAINER.items()}
    trainer = shardwise.sagemaker.ModelTrainer(**arguments)
    trainer.with_metric_definitions([shardwise.sagemaker.MetricDefinition(**metric) for metric in METRICS])
    inputs = [sdk_requests.made_of(value, kinds) for value in TRAINERS_INPUTS]
    request = trainer.train(inputs, dry_run=True)
    assert request is not None
    made = common(request)
    to_container = {name for name in made["HyperParameters"] if name.startswith("sagemaker_")}
    made["HyperParameters"] = {
        name: made["HyperParameters"][name] for name in made["HyperParameters"].keys() - to_container
    }
    assert made == expected
