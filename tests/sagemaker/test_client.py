"""The service's client: roles, buckets, uploads, downloads, the wait for a job with its log, and refusals by name."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from shardwise.errors import ConfigError, DataError, MachineError, WorkerError
from shardwise.sagemaker.client import JobLog, ServiceClient
from tests.sagemaker.made_service import ACCOUNT, MadeSession


@pytest.fixture
def session() -> MadeSession:
    return MadeSession()


def test_a_role_may_be_given_by_its_name(session: MadeSession) -> None:
    client = ServiceClient(session)
    assert client.role("arn:aws:iam::1:role/a") == "arn:aws:iam::1:role/a"
    assert client.role("train") == f"arn:aws:iam::{ACCOUNT}:role/train"
    with pytest.raises(MachineError, match=r"role='nobody': ServiceRefusal: no role nobody; check region"):
        client.role("nobody")


@pytest.mark.parametrize(
    ("region", "settings"),
    [("us-east-1", {}), ("eu-west-1", {"CreateBucketConfiguration": {"LocationConstraint": "eu-west-1"}})],
)
def test_the_default_bucket_is_made_once_in_its_region(region: str, settings: dict[str, object]) -> None:
    session = MadeSession(region)
    name = f"sagemaker-{region}-{ACCOUNT}"
    assert ServiceClient(session).default_bucket() == name
    assert session.buckets == {name: settings}
    session.buckets[name] = {"made": "before"}
    assert ServiceClient(session).default_bucket() == name
    assert session.buckets == {name: {"made": "before"}}


def test_a_session_of_the_sdk_brings_its_own_bucket(session: MadeSession) -> None:
    given = SimpleNamespace(boto_session=session, _default_bucket_name_override="mine")
    client = ServiceClient(given)
    assert client.default_bucket() == "mine" and not session.buckets
    assert client.region == session.region


def test_files_come_back_as_they_were_uploaded(session: MadeSession, tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "deep").mkdir(parents=True)
    (data / "a.txt").write_text("a")
    (data / "deep" / "b.txt").write_text("b")
    client = ServiceClient(session)
    client.upload_directory(data, "s3://bucket/run/")
    client.upload_directory(data / "a.txt", "s3://bucket")
    session.objects["bucket", "run/empty/"] = b""  # which S3's console makes for a directory
    assert sorted(key for _, key in session.objects) == ["a.txt", "run/a.txt", "run/deep/b.txt", "run/empty/"]
    client.download("s3://bucket/run", tmp_path / "copy")
    copied = {path.relative_to(tmp_path / "copy"): path.read_text() for path in (tmp_path / "copy").rglob("*.txt")}
    assert copied == {Path("a.txt"): "a", Path("deep/b.txt"): "b"}
    client.download("s3://bucket/run/deep/b.txt", tmp_path / "one")  # an object's own name
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["b.txt"]
    session.objects["bucket", "out/"] = b""  # the directory that is asked for
    session.objects["bucket", "out/../../evil.txt"] = b"x"
    with pytest.raises(DataError, match=r"'\.\./\.\./evil.txt', which leads out of"):
        client.download("s3://bucket/out/", tmp_path / "deep" / "in")
    assert not list((tmp_path / "deep").rglob("*.txt")) and not (tmp_path / "evil.txt").exists()


def test_nothing_to_upload_or_download_is_a_mistake(session: MadeSession, tmp_path: Path) -> None:
    client = ServiceClient(session)
    with pytest.raises(ConfigError, match="holds no file"):
        client.upload_directory(tmp_path, "s3://bucket/run")
    with pytest.raises(ConfigError, match=r"s3://bucket/run holds no object; check the URI"):
        client.download("s3://bucket/run", tmp_path)
    with pytest.raises(ConfigError, match=r"'/run' is no URI of S3; write s3://bucket/prefix"):
        client.download("/run", tmp_path)


def test_only_what_boto3_raises_is_the_service_s(session: MadeSession, monkeypatch: pytest.MonkeyPatch) -> None:
    client = ServiceClient(session)
    assert client.upload(b"rows", "s3://bucket/rows") == "s3://bucket/rows"
    assert session.objects == {("bucket", "rows"): b"rows"}
    del session.objects["bucket", "rows"]
    monkeypatch.setattr(session, "_list_objects_v2", lambda **_: iter([{"Contents": [{"Key": "rows"}]}]))
    with pytest.raises(KeyError):  # a fault of the test's own session, which is raised as it is
        ServiceClient(session).download("s3://bucket/rows", Path("."))


def test_a_job_is_awaited_with_its_states_and_log() -> None:
    session = MadeSession(
        states=[
            {"TrainingJobStatus": "InProgress", "SecondaryStatus": "Starting"},
            {"TrainingJobStatus": "InProgress", "SecondaryStatus": "Training"},
            {"TrainingJobStatus": "InProgress", "SecondaryStatus": "Training"},
            {"TrainingJobStatus": "Completed", "ModelArtifacts": {"S3ModelArtifacts": "s3://bucket/m"}},
        ]
    )
    session.log = {
        "run/algo-1-16": [["step 1", "step 2"], ["step 3"]],
        "run/algo-2-16": [["hello"]],
        "other/algo-1-16": [["x"]],
    }
    client = ServiceClient(session)
    said: list[str] = []
    arn = client.start({"TrainingJobName": "run"})
    assert arn.endswith("training-job/run")
    described = client.wait("run", said.append, with_logs=True, pause=0.0)
    assert described["ModelArtifacts"] == {"S3ModelArtifacts": "s3://bucket/m"}
    states = [line for line in said if line.startswith("run: ")]
    assert states == ["run: Starting", "run: Training", "run: Completed"]
    assert [line for line in said if "|" in line] == [
        "algo-1 | step 1", "algo-1 | step 2", "algo-1 | step 3", "algo-2 | hello"
    ]  # fmt: skip


def test_a_failed_job_has_the_service_s_reason() -> None:
    session = MadeSession(states=[{"TrainingJobStatus": "Failed", "FailureReason": "AlgorithmError: no epochs"}])
    client = ServiceClient(session)
    client.start({"TrainingJobName": "run"})
    with pytest.raises(MachineError, match="there is a job run"):
        client.start({"TrainingJobName": "run"})
    with pytest.raises(WorkerError, match="training job run failed: AlgorithmError: no epochs"):
        client.wait("run", lambda text: None, with_logs=False, pause=0.0)
    with pytest.raises(MachineError, match="training job other: ServiceRefusal: no job other"):
        client.describe("other")


def test_a_log_is_read_on_from_where_it_ended(session: MadeSession) -> None:
    log = JobLog(ServiceClient(session), "run")
    assert list(log.new_lines()) == []  # no job of the account has printed anything
    session.log = {"run/algo-1-16": [["one"]]}
    assert list(log.new_lines()) == ["algo-1 | one"]
    assert list(log.new_lines()) == []
    session.log["run/algo-1-16"].append(["two"])
    assert list(log.new_lines()) == ["algo-1 | two"]
