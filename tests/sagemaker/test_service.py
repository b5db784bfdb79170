"""A job of the service, from the call to its description: moto's server on loopback plays SageMaker, S3 and IAM."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from shardwise.errors import MachineError
from shardwise.sagemaker import PyTorch
from shardwise.sagemaker.client import ServiceClient, split_uri, stream_host

ROLE = "arn:aws:iam::123456789012:role/train"
IMAGE = "123456789012.dkr.ecr.us-east-1.amazonaws.com/shardwise:0.2"


def test_hosts_and_buckets_of_names() -> None:
    assert stream_host("job/algo-2-1650000000") == "algo-2"
    assert split_uri("s3://bucket/a/b") == ("bucket", "a/b")


@pytest.mark.slow  # boto3 reads the models of four services
def test_a_job_is_uploaded_started_and_awaited(s3: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("boto3")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.txt").write_text("rows")
    (tmp_path / "train.py").write_text("print('hello')\n")
    estimator = PyTorch(
        entry_point="train.py",
        source_dir=str(tmp_path),
        role="train",
        image_uri=IMAGE,
        instance_type="ml.p4d.24xlarge",
        instance_count=2,
        output_path="s3://shardwise-test/out",
        distribution={
            "torch_distributed": {"enabled": True},
            "smdistributed": {"modelparallel": {"enabled": True, "parameters": {"tensor_parallel_degree": 2}}},
        },
    )
    client = ServiceClient()
    client.service("iam").create_role(RoleName="train", AssumeRolePolicyDocument="{}", Path="/")
    estimator.fit({"train": str(tmp_path / "data")}, job_name="first")
    described = client.describe("first")
    assert described["RoleArn"].endswith("role/train") and described["TrainingJobStatus"] == "Completed"
    assert described["HyperParameters"]["mp_parameters"] == '{"tensor_parallel_degree": 2}'
    bucket, prefix = split_uri(described["InputDataConfig"][1]["DataSource"]["S3DataSource"]["S3Uri"])
    assert bucket.startswith("sagemaker-us-east-1-") and prefix == "first/source/sourcedir.tar.gz"
    packed = client.service("s3").get_object(Bucket=bucket, Key=prefix)["Body"].read()
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        assert "train.py" in archive.getnames()
    client.download(f"s3://{bucket}/first/input/train", tmp_path / "copy")
    assert (tmp_path / "copy" / "rows.txt").read_text() == "rows"
    assert estimator.model_data == "s3://shardwise-test/out/first/output/model.tar.gz"
    assert "started training job first" in capsys.readouterr().out
    with pytest.raises(MachineError, match="role='nobody'"):
        client.role("nobody")


def test_without_boto3_its_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.setitem(__import__("sys").modules, "boto3", None)
    estimator = PyTorch(
        str(tmp_path / "train.py"), role=ROLE, image_uri=IMAGE, instance_type="ml.m5.xlarge", instance_count=1
    )
    with pytest.raises(MachineError, match=r"pip install 'shardwise\[sagemaker\]'"):
        estimator.fit()
