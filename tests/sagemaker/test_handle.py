"""A job from its draft to its handle: on the service, which answers out of this process, and on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import ConfigError, MachineError
from shardwise.sagemaker import PyTorch
from shardwise.sagemaker.client import ServiceClient
from shardwise.sagemaker.handle import start
from tests.sagemaker.made_service import ACCOUNT, MadeSession

IMAGE = "123456789012.dkr.ecr.us-east-1.amazonaws.com/shardwise:0.2"


def estimator(directory: Path, session: MadeSession | None = None, **arguments: Any) -> PyTorch:
    """Return an estimator of one script."""
    (directory / "train.py").write_text("print('hello')\n")
    given = {"instance_type": "ml.p5.48xlarge", "instance_count": 1, "role": "train", "image_uri": IMAGE}
    return PyTorch(str(directory / "train.py"), sagemaker_session=session, **(given | arguments))


def test_a_job_of_the_service_is_uploaded_started_and_awaited(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.txt").write_text("rows")
    session = MadeSession(
        states=[{"TrainingJobStatus": "Completed", "ModelArtifacts": {"S3ModelArtifacts": "s3://bucket/model.tar.gz"}}]
    )
    made = estimator(tmp_path, session, output_path="s3://bucket/out")
    made.fit({"train": str(tmp_path / "rows.txt"), "more": "s3://bucket/more"}, job_name="run")
    bucket = f"sagemaker-us-east-1-{ACCOUNT}"
    assert set(session.objects) == {(bucket, "run/source/sourcedir.tar.gz"), (bucket, "run/input/train/rows.txt")}
    request = session.requests["run"]
    assert request["RoleArn"].endswith(":role/train")
    assert json.loads(request["HyperParameters"]["sagemaker_region"]) == "us-east-1"
    channels = {
        channel["ChannelName"]: channel["DataSource"]["S3DataSource"]["S3Uri"] for channel in request["InputDataConfig"]
    }
    assert channels["more"] == "s3://bucket/more" and channels["train"] == f"s3://{bucket}/run/input/train"
    assert made.model_data == "s3://bucket/model.tar.gz"
    printed = capsys.readouterr().out
    assert f"upload {tmp_path / 'rows.txt'} as channel train" in printed
    assert printed.index("started training job run") < printed.index("run: Completed")


def test_a_job_that_is_not_awaited_is_described_and_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    session = MadeSession(states=[{"TrainingJobStatus": "InProgress"}])
    made = estimator(tmp_path, session)
    made.fit(wait=False, job_name="run")
    handle = made.latest_training_job
    assert handle is not None and handle.describe() == {"TrainingJobStatus": "InProgress"}
    assert handle.model_data is None  # there is none yet
    handle.stop()
    assert session.stopped == ["run"]
    assert "run:" not in capsys.readouterr().out  # nobody waited
    with pytest.raises(MachineError, match="there is a job run"):
        made.fit(job_name="run")


def test_code_in_s3_is_not_uploaded(tmp_path: Path) -> None:
    session = MadeSession()
    given = {"instance_type": "ml.p5.48xlarge", "instance_count": 1, "role": "train", "image_uri": IMAGE}
    made = PyTorch("train.py", source_dir="s3://bucket/code.tar.gz", sagemaker_session=session, **given)
    made.fit(wait=False, job_name="run")
    assert not session.objects
    assert json.loads(session.requests["run"]["HyperParameters"]["sagemaker_submit_directory"]) == (
        "s3://bucket/code.tar.gz"
    )


def test_a_job_of_this_machine_names_what_has_no_effect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = estimator(
        tmp_path, instance_type="local", container_entry_point=["sh", "-c", "echo 1 > model/weights"],
        output_path="s3://bucket/out", checkpoint_s3_uri="s3://bucket/kept", use_spot_instances=True, max_wait=90_000,
    )  # fmt: skip
    session = MadeSession()
    handle = start(made.draft(job_name="run"), ServiceClient(session), ("a note.",), wait=False, with_logs=True,
                   root=tmp_path / "root")  # fmt: skip
    out, error = capsys.readouterr()
    notes = "".join((out + error).split())
    for note in ("a note.", "image_uri, role, use_spot_instances: no effect in local mode", "wait=False has no effect",
                 "kept beside the host, not in S3", "archives stay on this machine"):  # fmt: skip
        assert note.replace(" ", "") in notes, note
    assert not session.requests and not session.objects
    assert handle.run is not None and handle.model_data == handle.run.model_data is not None
    handle.wait()  # it has ended
    handle.stop()
    assert not session.stopped
    with pytest.raises(ConfigError, match="run ran on this machine, the service knows nothing of it"):
        handle.describe()
