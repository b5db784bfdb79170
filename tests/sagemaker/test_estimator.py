"""The estimator of version 2: what its arguments come to, and what is refused before anything is uploaded."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import ConfigError, LegalityError
from shardwise.sagemaker import FileSystemInput, InstanceGroup, PyTorch, TrainingInput
from shardwise.sagemaker.estimator import IDLE, REFUSED, EstimatorSettings
from shardwise.sagemaker.source import SourceFiles
from tests.sagemaker.test_request import complaints

ROLE = "arn:aws:iam::123456789012:role/train"
IMAGE = "123456789012.dkr.ecr.us-east-1.amazonaws.com/shardwise:0.2"
SMP2 = {"torch_distributed": {"enabled": True}, "smdistributed": {"modelparallel": {"enabled": True}}}
# Every argument of `sagemaker.pytorch.PyTorch` 2.257, its bases included.
SDK_ARGUMENTS = """
entry_point framework_version py_version source_dir hyperparameters image_uri distribution compiler_config
training_recipe recipe_overrides container_log_level code_location dependencies enable_network_isolation git_config
checkpoint_s3_uri checkpoint_local_path enable_sagemaker_metrics role instance_count instance_type
keep_alive_period_in_seconds volume_size volume_kms_key max_run input_mode output_path output_kms_key base_job_name
sagemaker_session tags subnets security_group_ids model_uri model_channel_name metric_definitions
encrypt_inter_container_traffic use_spot_instances max_wait rules debugger_hook_config tensorboard_output_config
profiler_config disable_profiler environment max_retry_attempts instance_groups training_repository_access_mode
training_repository_credentials_provider_arn enable_infra_check container_entry_point container_arguments
disable_output_compression enable_remote_debug enable_session_tag_chaining training_plan instance_placement_config
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "train.py").write_text("print('hello')\n")
    return str(tmp_path / "train.py")


def estimator(script: str, **arguments: Any) -> PyTorch:
    given = {"role": ROLE, "image_uri": IMAGE, "instance_type": "ml.p4d.24xlarge", "instance_count": 2} | arguments
    return PyTorch(entry_point=script, **{name: value for name, value in given.items() if value is not None})


def smp(**parameters: Any) -> dict[str, Any]:
    return {
        "torch_distributed": {"enabled": True},
        "smdistributed": {"modelparallel": {"enabled": True, "parameters": parameters}},
    }


def test_every_argument_of_the_sdk_has_an_answer() -> None:
    assert sorted(SDK_ARGUMENTS.split()) == sorted([*EstimatorSettings.model_fields, *IDLE, *REFUSED])


def test_the_request_of_a_usual_estimator(script: str) -> None:
    made = estimator(
        script,
        framework_version="2.0",
        hyperparameters={"epochs": 3, "name": "gpt2"},
        distribution=smp(tensor_parallel_degree=2, hybrid_shard_degree=8),
        checkpoint_s3_uri="s3://bucket/checkpoints",
        use_spot_instances=True,
        max_run=100,
        max_wait=200,
        tags=[{"Key": "team", "Value": "a"}],
        subnets=["subnet-1"],
        security_group_ids=["sg-1"],
        max_retry_attempts=2,
        debugger_hook_config=False,
        environment={"NCCL_DEBUG": "WARN"},
        output_path="s3://bucket/out",
    )
    inputs = {"train": "s3://bucket/train", "fsx": FileSystemInput("fs-01234567", "FSxLustre", "/fsx/data")}
    request = made.draft(inputs, "gpt").request("s3://bucket/gpt")
    assert complaints(request) == ""
    parameters = request["HyperParameters"]
    assert parameters["epochs"] == "3" and parameters["name"] == '"gpt2"'
    assert parameters["mp_parameters"] == '{"tensor_parallel_degree": 2, "hybrid_shard_degree": 8}'
    assert parameters["sagemaker_torch_distributed_enabled"] == "true"
    assert parameters["sagemaker_program"] == '"train.py"'
    assert parameters["sagemaker_submit_directory"] == '"s3://bucket/gpt/source/sourcedir.tar.gz"'
    assert [channel["ChannelName"] for channel in request["InputDataConfig"]] == ["train", "fsx", "code"]
    assert request["AlgorithmSpecification"]["ContainerEntrypoint"] == ["shardwise", "train"]
    assert {"Name": "train:loss", "Regex": request["AlgorithmSpecification"]["MetricDefinitions"][0]["Regex"]} in (
        request["AlgorithmSpecification"]["MetricDefinitions"]
    )
    assert request["EnableManagedSpotTraining"] and request["Tags"] == [{"Key": "team", "Value": "a"}]
    assert request["VpcConfig"] == {"SecurityGroupIds": ["sg-1"], "Subnets": ["subnet-1"]}
    assert made.notes == ["framework_version='2.0' has no effect here: image_uri says which torch there is."]


def test_inputs_in_all_forms(script: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    draft = estimator(script).draft(
        {
            "near": str(tmp_path / "data"),
            "url": f"file://{tmp_path}/data",
            "s3": TrainingInput("s3://bucket/x", input_mode="FastFile", content_type="text/plain"),
        },
        "job",
    )
    channels = {channel["ChannelName"]: channel for channel in draft.request("s3://b/job")["InputDataConfig"]}
    assert channels["near"]["DataSource"]["S3DataSource"]["S3Uri"] == "s3://b/job/input/near"
    assert draft.inputs["url"] == tmp_path / "data"
    assert channels["s3"]["InputMode"] == "FastFile"
    assert list(estimator(script).draft("s3://bucket/x").inputs) == ["training"]


def test_attributes_are_the_arguments(script: str) -> None:
    made = estimator(script)
    made.set_hyperparameters(epochs=1)
    assert (made.instance_count, made.hyperparameters()) == (2, {"epochs": 1})
    assert made.model_data is None and not hasattr(made, "nothing")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"instance_typ": "x"}, "unknown argument instance_typ='x'. Did you mean 'instance_type'"),
        ({"instance_count": "many"}, "instance_count='many'"),
        ({"instance_type": None}, "instance_type is not given"),
        ({"git_config": {"repo": "x"}}, "git_config=.* is refused: .*clone the repository"),
        ({"rules": ["x"]}, "rules=.* is refused: SageMaker Debugger"),
        ({"training_recipe": "x"}, "use `shardwise recipe RECIPE --to sagemaker`"),
        ({"instance_groups": []}, "leave instance_type and _count out"),
    ],
)
def test_what_a_constructor_refuses(script: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        estimator(script, **arguments)


@pytest.mark.parametrize(
    ("arguments", "inputs", "message"),
    [
        ({"role": None}, None, "role is not given"),
        ({"image_uri": None}, None, "image_uri is not given; Amazon's images do not hold shardwise"),
        ({"hyperparameters": {"data": Path("x")}}, None, "hyperparameter data: Object of type PosixPath"),
        ({"distribution": {"horovod": {}}}, None, "distribution: unknown key 'horovod'"),
        ({"distribution": {"mpi": {"enabled": "yes"}}}, None, "mpi.enabled='yes': must be True or False"),
        ({"distribution": {"smdistributed": {}}}, None, "give one of modelparallel and dataparallel"),
        ({"distribution": {"mpi": {"enabled": True, "processes_per_host": 0}}}, None, "processes_per_host=0"),
        (
            {"distribution": {"mpi": {"enabled": True, "custom_mpi_options": "-x A='b"}}},
            None,
            "mpi.custom_mpi_options=.*close the quotes",
        ),
        ({"distribution": smp(tensor_degree=2)}, None, "unknown key 'tensor_degree'"),
        ({"subnets": ["a"]}, None, "subnets and security_group_ids belong together"),
        ({"use_spot_instances": True}, None, "max_wait=None"),
        ({"environment": {"HF_TOKEN": "hf_abcdefghijklmnopqrstuvwx"}}, None, "HF_TOKEN looks like a secret"),
        ({"tags": ["a"]}, None, "tags="),
        ({}, {"code": "s3://bucket/x"}, "input 'code'"),
        ({}, {"train": "gs://bucket/x"}, "SageMaker takes s3://"),
        ({}, {"train": "/no/where"}, "does not exist"),
        ({}, {"train": 3}, "input train=3: must be"),
        ({"instance_type": "ml.p9.large", "distribution": smp()}, None, "'ml.p9.large' is not known"),
    ],
)
def test_what_is_refused_before_anything_is_uploaded(
    script: str, arguments: dict[str, Any], inputs: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        estimator(script, sagemaker_session=object(), **arguments).fit(inputs)


def test_options_are_checked_for_the_instances(script: str) -> None:
    with pytest.raises(LegalityError, match=r"tensor_parallel_degree=3 on 2 x 8 ranks: .*16 ranks"):
        estimator(script, distribution=smp(tensor_parallel_degree=3)).draft().check()
    wide = estimator(script, distribution=smp(tensor_parallel_degree=8), instance_count=64)
    assert wide.draft().check() == []
    mpi = {"mpi": {"enabled": True, "processes_per_host": 9}, "smdistributed": SMP2["smdistributed"]}
    with pytest.raises(ConfigError, match=r"processes_per_host=9: ml\.p4d\.24xlarge has 8 GPUs"):
        estimator(script, distribution=mpi).draft().check()


def test_options_of_version_1(script: str, tmp_path: Path) -> None:
    (tmp_path / "options.json").write_text('{"pipeline_parallel_degree": 2, "microbatches": 4, "ddp": true}')
    distribution = {
        "smdistributed": {"modelparallel": {"enabled": True, "parameters": str(tmp_path / "options.json")}},
        "mpi": {"enabled": True, "processes_per_host": 8, "custom_mpi_options": "-verbose -x NCCL_DEBUG=VERSION"},
    }
    draft = estimator(script, distribution=distribution).draft(None, "job")
    notes = draft.check()
    assert any("-verbose has no effect here: ranks are started without mpirun" in note for note in notes)
    request = draft.request()
    assert request["Environment"] == {"NCCL_DEBUG": "VERSION"}
    assert request["HyperParameters"]["sagemaker_mpi_num_of_processes_per_host"] == "8"


def test_instance_groups(script: str) -> None:
    groups = [
        InstanceGroup(instance_type="ml.p4d.24xlarge", instance_count=2, instance_group_name="a"),
        InstanceGroup(instance_type="ml.m5.xlarge", instance_count=1, instance_group_name="b"),
    ]
    made = PyTorch(
        entry_point=script, role=ROLE, image_uri=IMAGE, instance_groups=groups,
        distribution=smp(tensor_parallel_degree=16) | {"instance_groups": [groups[0]]},
    )  # fmt: skip
    draft = made.draft(None, "job")
    draft.check()
    assert complaints(draft.request()) == ""
    assert [group["InstanceGroupName"] for group in draft.request()["ResourceConfig"]["InstanceGroups"]] == ["a", "b"]
    misnamed = PyTorch(
        entry_point=script, role=ROLE, image_uri=IMAGE, instance_groups=groups, distribution={"instance_groups": ["c"]}
    )
    with pytest.raises(ConfigError, match=r"distribution\.instance_groups=\['c'\]: the job has a, b"):
        misnamed.draft(None, "job").check()


def test_what_else_an_estimator_does_is_refused_by_name(script: str) -> None:
    with pytest.raises(ConfigError, match=r"PyTorch\.deploy: shardwise trains"):
        estimator(script).deploy()


def test_equal_files_make_equal_archives(tmp_path: Path) -> None:
    (tmp_path / "source" / "inner").mkdir(parents=True)
    (tmp_path / "source" / "__pycache__").mkdir()
    for name in ("train.py", "inner/more.py", "__pycache__/x.pyc"):
        (tmp_path / "source" / name).write_text(name)
    (tmp_path / "beside.py").write_text("beside")
    source = SourceFiles("train.py", str(tmp_path / "source"), (str(tmp_path / "beside.py"),))
    source.check()
    packed = source.archive()
    assert packed == source.archive()
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(packed))) as archive:
        assert archive.getnames() == ["beside.py", "inner/more.py", "train.py"]
    with pytest.raises(ConfigError, match=r"entry_point='trian\.py' is not a file\. Did you mean .*train\.py"):
        SourceFiles("trian.py", str(tmp_path / "source")).check()
