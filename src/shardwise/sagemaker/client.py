"""SageMaker's service through boto3: files into S3, a job started, watched and stopped.

boto3 is imported on first use (extra `sagemaker`). What it needs is found where it always is: environment, profile or
the role of the machine; AWS_ENDPOINT_URL is another address of the service. No credential is written down or shown.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError, DataError, MachineError, WorkerError

ENDED = ("Completed", "Failed", "Stopped")
LOG_GROUP = "/aws/sagemaker/TrainingJobs"
PAUSE = 5.0  # seconds between two looks at a job
Say = Callable[[str], None]


class ServiceClient:
    """The services of one account and region.

    Args:
        session: a boto3 session, an object that holds one as `boto_session` (the Session of SageMaker's SDK), or None
            for boto3's default.
    """

    def __init__(self, session: Any = None) -> None:
        self._session = getattr(session, "boto_session", None) or session
        self._bucket_name = getattr(session, "_default_bucket_name_override", None)
        self._clients: dict[str, Any] = {}

    def service(self, name: str) -> Any:
        """Return boto3's client of a service.

        Raises:
            MachineError: boto3 is not installed, or knows no region.
        """
        if name not in self._clients:
            session = self._session or _boto3().Session()
            with _explained(f"{name} cannot be reached"):
                self._clients[name] = session.client(name)
        return self._clients[name]

    @property
    def region(self) -> str:
        """The region of the account."""
        return str(self.service("sagemaker").meta.region_name)

    def role(self, role: str) -> str:
        """Return the ARN of a role, which may be given by its name."""
        if "/" in role:
            return role
        with _explained(f"role={role!r}"):
            return str(self.service("iam").get_role(RoleName=role)["Role"]["Arn"])

    def default_bucket(self) -> str:
        """Return the account's bucket for SageMaker, by the name that the SDK gives it; it is made where it is missing.

        Raises:
            MachineError: it cannot be.
        """
        if self._bucket_name is None:
            with _explained("the default bucket"):
                account = self.service("sts").get_caller_identity()["Account"]
                name = f"sagemaker-{self.region}-{account}"
                self._make_bucket(name)
            self._bucket_name = name
        return str(self._bucket_name)

    def upload(self, content: bytes, uri: str) -> str:
        """Write an object; returns its URI."""
        bucket, key = split_uri(uri)
        with _explained(f"upload to {uri}"):
            self.service("s3").put_object(Bucket=bucket, Key=key, Body=content)
        return uri

    def upload_directory(self, path: Path, uri: str) -> str:
        """Write a file, or the files below a directory, below a prefix; returns the prefix."""
        bucket, prefix = split_uri(uri)
        files = [path] if path.is_file() else sorted(entry for entry in path.rglob("*") if entry.is_file())
        if not files:
            raise ConfigError(f"input {str(path)!r} holds no file; give a directory of files")
        with _explained(f"upload to {uri}"):
            for file in files:
                name = file.name if path.is_file() else file.relative_to(path).as_posix()
                self.service("s3").upload_file(str(file), bucket, f"{prefix.rstrip('/')}/{name}".lstrip("/"))
        return uri

    def download(self, uri: str, directory: Path) -> None:
        """Write the objects below a prefix into a directory.

        Raises:
            ConfigError: there are none.
            DataError: the name of one leads out of the directory.
        """
        bucket, prefix = split_uri(uri)
        count = 0
        with _explained(f"download from {uri}"):
            for page in self.service("s3").get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
                for item in page.get("Contents", []):
                    name = item["Key"].removeprefix(prefix).lstrip("/") or Path(item["Key"]).name
                    if not item["Key"].endswith("/"):
                        target = _inside(directory, name, uri)
                        target.parent.mkdir(parents=True, exist_ok=True)
                        self.service("s3").download_file(bucket, item["Key"], str(target))
                        count += 1
        if not count:
            raise ConfigError(f"{uri} holds no object; check the URI")

    def start(self, request: Mapping[str, Any]) -> str:
        """Start a training job; returns its ARN.

        Raises:
            MachineError: the service refuses it, or has one of this name.
        """
        with _explained(f"training job {request['TrainingJobName']}"):
            return str(self.service("sagemaker").create_training_job(**request)["TrainingJobArn"])

    def describe(self, name: str) -> dict[str, Any]:
        """Return what the service says of a job."""
        with _explained(f"training job {name}"):
            return dict(self.service("sagemaker").describe_training_job(TrainingJobName=name))

    def stop(self, name: str) -> None:
        """Ask a job to stop: its containers get SIGTERM, save a checkpoint and end."""
        with _explained(f"training job {name}"):
            self.service("sagemaker").stop_training_job(TrainingJobName=name)

    def wait(self, name: str, say: Say, with_logs: bool, pause: float = PAUSE) -> dict[str, Any]:
        """Wait for the end of a job, saying what its containers print and how its state changes.

        Raises:
            WorkerError: it failed, with the service's reason.
        """
        log, state = JobLog(self, name), ""
        while True:
            described = self.describe(name)
            status = described["TrainingJobStatus"]
            if described.get("SecondaryStatus", status) != state:
                state = described.get("SecondaryStatus", status)
                say(f"{name}: {state}")
            for line in log.new_lines() if with_logs else ():
                say(line)
            if status in ENDED:
                break
            time.sleep(pause)
        if status == "Failed":
            reason = described.get("FailureReason", "the service gives no reason")
            raise WorkerError(f"training job {name} failed: {reason}")
        return described

    def _make_bucket(self, name: str) -> None:
        client = self.service("s3")
        if name in {bucket["Name"] for bucket in client.list_buckets()["Buckets"]}:
            return
        where = {} if self.region == "us-east-1" else {
            "CreateBucketConfiguration": {"LocationConstraint": self.region}
        }  # fmt: skip
        client.create_bucket(Bucket=name, **where)


class JobLog:
    """Lines that the containers of a job have printed, in CloudWatch."""

    def __init__(self, client: ServiceClient, name: str) -> None:
        self._client, self._name = client, name
        self._tokens: dict[str, str] = {}

    def new_lines(self) -> Iterator[str]:
        """Yield the lines since the last call, each with the name of its host."""
        logs = self._client.service("logs")
        pages = logs.get_paginator("describe_log_streams").paginate(
            logGroupName=LOG_GROUP, logStreamNamePrefix=f"{self._name}/"
        )
        with _explained(f"the log of {self._name}"):
            try:
                streams = [item["logStreamName"] for page in pages for item in page["logStreams"]]
            except logs.exceptions.ResourceNotFoundException:  # nothing has been printed in this account yet
                return
            for stream in streams:
                yield from (f"{stream_host(stream)} | {line}" for line in self._lines_of(logs, stream))

    def _lines_of(self, logs: Any, stream: str) -> Iterator[str]:
        while True:
            known = {"nextToken": self._tokens[stream]} if stream in self._tokens else {}
            page = logs.get_log_events(logGroupName=LOG_GROUP, logStreamName=stream, startFromHead=True, **known)
            yield from (event["message"] for event in page["events"])
            before, self._tokens[stream] = self._tokens.get(stream), page["nextForwardToken"]
            if not page["events"] or before == page["nextForwardToken"]:
                return


def stream_host(stream: str) -> str:
    """Return the host of a log stream: `JOB/algo-2-1650000000` is `algo-2`."""
    return stream.rpartition("/")[2].rpartition("-")[0]


def _inside(directory: Path, name: str, uri: str) -> Path:
    """Return where an object of this name goes; whoever writes to a bucket chooses names.

    Raises:
        DataError: not into the directory.
    """
    target = directory / name
    if not target.resolve().is_relative_to(directory.resolve()):
        raise DataError(f"{uri} has an object {name!r}, which leads out of {directory}; rename it")
    return target


def split_uri(uri: str) -> tuple[str, str]:
    """Return bucket and key of an S3 URI. Raises ConfigError where it is none."""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    if not uri.startswith("s3://") or not bucket:
        raise ConfigError(f"{uri!r} is no URI of S3; write s3://bucket/prefix")
    return bucket, key


def _boto3() -> Any:
    try:
        return importlib.import_module("boto3")
    except ImportError as error:
        raise MachineError(
            "SageMaker is reached through boto3, which is not installed; run `pip install 'shardwise[sagemaker]'`, or "
            "use instance_type='local'"
        ) from error


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turn what boto3 raises in the body into an error with a name."""
    try:
        yield
    except (ConfigError, MachineError):
        raise
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in ("botocore", "boto3"):
            raise
        raise MachineError(f"{what}: {type(error).__name__}: {error}; check region, credentials and rights") from error
