"""A session of boto3 that answers out of this process: objects of S3, a role, jobs with their states, and a log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ACCOUNT = "123456789012"


class ServiceRefusal(Exception):
    """What botocore raises where a service refuses a call."""


ServiceRefusal.__module__ = "botocore.exceptions"  # by which it is known


class MadeSession:
    """A session with everything that its services keep.

    Attributes:
        objects: contents of S3 by (bucket, key).
        requests: jobs that were started, by their names.
        states: what `describe_training_job` answers, one after another; the last is kept.
        log: pages of events of each log stream; None: the account has no log group.
    """

    def __init__(self, region: str = "us-east-1", states: list[dict[str, Any]] | None = None) -> None:
        self.region = region
        self.buckets: dict[str, dict[str, Any]] = {}
        self.objects: dict[tuple[str, str], bytes] = {}
        self.requests: dict[str, Mapping[str, Any]] = {}
        self.states = states or [{"TrainingJobStatus": "Completed"}]
        self.log: dict[str, list[list[str]]] | None = None
        self.stopped: list[str] = []

    def client(self, name: str) -> Any:
        """Return the client of a service; its calls are the methods of this session."""
        return SimpleNamespace(
            meta=SimpleNamespace(region_name=self.region),
            exceptions=SimpleNamespace(ResourceNotFoundException=KeyError),
            **{call: getattr(self, call) for call in dir(self) if call.islower() and not call.startswith("_")},
        )

    def get_caller_identity(self) -> dict[str, str]:
        return {"Account": ACCOUNT}

    def get_role(self, RoleName: str) -> dict[str, Any]:
        if RoleName != "train":
            raise ServiceRefusal(f"no role {RoleName}")
        return {"Role": {"Arn": f"arn:aws:iam::{ACCOUNT}:role/{RoleName}"}}

    def list_buckets(self) -> dict[str, Any]:
        return {"Buckets": [{"Name": name} for name in self.buckets]}

    def create_bucket(self, Bucket: str, **settings: Any) -> None:
        self.buckets[Bucket] = settings

    def put_object(self, Bucket: str, Key: str, Body: bytes) -> None:
        self.objects[Bucket, Key] = Body

    def upload_file(self, path: str, bucket: str, key: str) -> None:
        self.objects[bucket, key] = Path(path).read_bytes()

    def download_file(self, bucket: str, key: str, path: str) -> None:
        Path(path).write_bytes(self.objects[bucket, key])

    def get_paginator(self, call: str) -> Any:
        return SimpleNamespace(paginate=getattr(self, f"_{call}"))

    def _list_objects_v2(self, Bucket: str, Prefix: str) -> Iterator[dict[str, Any]]:
        keys = [key for bucket, key in self.objects if bucket == Bucket and key.startswith(Prefix)]
        yield from ({"Contents": [{"Key": key}]} for key in keys)
        yield {}  # a page without objects has no list of them

    def create_training_job(self, **request: Any) -> dict[str, str]:
        name = request["TrainingJobName"]
        if name in self.requests:
            raise ServiceRefusal(f"there is a job {name}")
        self.requests[name] = request
        return {"TrainingJobArn": f"arn:aws:sagemaker:{self.region}:{ACCOUNT}:training-job/{name}"}

    def describe_training_job(self, TrainingJobName: str) -> dict[str, Any]:
        if TrainingJobName not in self.requests:
            raise ServiceRefusal(f"no job {TrainingJobName}")
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]

    def stop_training_job(self, TrainingJobName: str) -> None:
        self.stopped.append(TrainingJobName)

    def _describe_log_streams(self, logGroupName: str, logStreamNamePrefix: str) -> Iterator[dict[str, Any]]:
        if self.log is None:
            raise KeyError(logGroupName)
        yield {"logStreams": [{"logStreamName": name} for name in self.log if name.startswith(logStreamNamePrefix)]}

    def get_log_events(self, logGroupName: str, logStreamName: str, startFromHead: bool, nextToken: str = "0") -> Any:
        """Return a page; the token of the next one, which stays at the end of what there is."""
        assert self.log is not None and startFromHead
        pages, number = self.log[logStreamName], int(nextToken)
        if number == len(pages):
            return {"events": [], "nextForwardToken": nextToken}
        return {"events": [{"message": line} for line in pages[number]], "nextForwardToken": str(number + 1)}
