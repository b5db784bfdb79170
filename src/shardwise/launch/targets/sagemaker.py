"""`sagemaker`: a training job of SageMaker, as the request that its API takes; no SDK of it is needed.

The job file travels as the channel `job`, where `shardwise train` in the container finds it. boto3 sends the request
(extra `sagemaker`).
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError, LaunchError, MachineError
from shardwise.job.schema import Job
from shardwise.job.sources import validate
from shardwise.launch.launch_plan import DerivedValue, LaunchPlan
from shardwise.launch.record import LaunchRecord
from shardwise.launch.targets.target import JOB_FILE, LaunchTarget, job_text, lies_in, local_paths, split_mount
from shardwise.observe.log_patterns import METRIC_PATTERNS
from shardwise.planner.formulas.prediction import Cluster
from shardwise.sagemaker.client import JobLog, ServiceClient
from shardwise.sagemaker.container import JOB_CHANNEL
from shardwise.sagemaker.request import TrainingJob, training_request
from shardwise.sagemaker.shapes import Channel, DataSource, FileSystemDataSource, S3DataSource

REQUEST = "request.json"
FILE_SYSTEM = re.compile(r"fs-[0-9a-f]{8,18}")
CHECKPOINTS = "/opt/ml/checkpoints"  # of a single host; each of several has its own
OUTPUT = "/opt/ml/output/data"
KEPT = (CHECKPOINTS, OUTPUT, "/opt/ml/model")  # what SageMaker uploads
INPUTS = "/opt/ml/input/data/"
MAX_RUN = 86_400  # seconds; the SDK's own default
MOST_RETRIES = 30  # that the service takes
ENTRYPOINT = ("shardwise", "train")


class SageMakerTarget(LaunchTarget):
    """A training job of SageMaker."""

    name = "sagemaker"
    summary = "a training job of SageMaker"
    needs_image = True
    names_jobs = True
    keys = (
        "image", "role", "region", "output_path", "time_limit", "mounts", "labels", "spot", "subnets",
        "security_groups", "volume_gb",
    )  # fmt: skip

    def check(self, job: Job) -> None:
        """Refuse a job without role or place of its output."""
        super().check(job)
        for key, example in (("role", "arn:aws:iam::111122223333:role/Training"), ("output_path", "s3://bucket/runs")):
            if getattr(job.launch, key) is None:
                raise ConfigError(f"launch.{key} is not set, and SageMaker needs it; give e.g. {example}")
        if not str(job.launch.output_path).startswith("s3://"):
            raise ConfigError(f"launch.output_path={job.launch.output_path!r}: must be a URI of S3, s3://BUCKET/PREFIX")
        if bool(job.launch.subnets) != bool(job.launch.security_groups):
            raise ConfigError("launch.subnets and launch.security_groups go together; give both or neither")

    def find_cluster(self, job: Job) -> Cluster:
        """Return the nodes, which have to be of an instance type."""
        where = super().find_cluster(job)
        if not where.instance:
            raise ConfigError(
                f"launch.cluster={job.launch.cluster}: SageMaker starts instance types; give e.g. ml.p5.48xlarge:4"
            )
        return where

    def finish(self, plan: LaunchPlan) -> LaunchPlan:
        """Give the job the ranks of a host, and places that SageMaker keeps; check the request."""
        data = plan.job.model_dump(mode="json", exclude_unset=True)
        data["parallel"]["workers"] = plan.ranks_of_node
        kept = [*KEPT, *(path for path, source in plan.settings.mounts.items() if source.startswith("fsx:"))]
        lost = {key: path for key, path in local_paths(plan).items() if not lies_in(path, kept)}
        if "output" in lost:
            data.pop("output", None)
        given = plan.job.checkpoint.directory
        if given is not None and ("checkpoint.directory" in lost or (plan.nodes > 1 and lies_in(given, KEPT))):
            note = f"checkpoint.directory={given} is left out: it would end with the job; see `checkpoints` above"
            plan = replace(plan, notes=(*plan.notes, note))
            data["checkpoint"].pop("directory")
        if plan.nodes > 1:
            data["checkpoint"].setdefault("directory", f"{_prefix(plan)}/checkpoints")
        plan = replace(plan, job=validate(data))
        self.request(plan)
        return super().finish(plan)

    def derive(self, plan: LaunchPlan) -> Iterator[DerivedValue]:
        """Yield instances, start, times and places."""
        settings, where = plan.settings, plan.cluster
        yield DerivedValue("InstanceType", f"ml.{where.instance} x {where.nodes}", f"launch.cluster {settings.cluster}")
        yield DerivedValue("start", " ".join(ENTRYPOINT), f"the job is the channel {JOB_CHANNEL}")
        yield DerivedValue("EFA", f"{where.efa} devices a node", "SageMaker attaches them")
        limit = "SageMaker's own" if plan.time_limit is None else f"launch.time_limit {settings.time_limit}"
        yield DerivedValue("MaxRuntimeInSeconds", str(plan.time_limit or MAX_RUN), limit)
        if settings.spot:
            yield DerivedValue("MaxWaitTimeInSeconds", str(_wait(plan)), "launch.spot: as long again for capacity")
        yield DerivedValue("stop", "SIGTERM, then 120 s", "SageMaker's own; the state is saved in that time")
        output = plan.job.output if "output" in plan.job.model_fields_set else OUTPUT
        yield DerivedValue("output", output, "SageMaker keeps it; any other directory ends with the job")
        yield DerivedValue("S3OutputPath", str(settings.output_path), "launch.output_path")
        own, given = f"{_prefix(plan)}/checkpoints", plan.job.checkpoint.directory
        is_given = given is not None and given != own and not lies_in(given, [CHECKPOINTS])
        rule = "checkpoint.directory" if is_given else "launch.output_path and the name"
        yield DerivedValue("checkpoints", str(given) if is_given else own, rule)
        if plan.max_restarts:
            limit = "" if plan.max_restarts <= MOST_RETRIES else f", of {plan.max_restarts} the most that it takes"
            rule = f"parallel.max_restarts{limit}; SageMaker's faults"
            yield DerivedValue("MaximumRetryAttempts", str(min(plan.max_restarts, MOST_RETRIES)), rule)

    def request(self, plan: LaunchPlan) -> dict[str, Any]:
        """Return the body of CreateTrainingJob.

        Raises:
            ConfigError: the service would refuse it.
        """
        settings = plan.settings
        more: dict[str, Any] = {}
        if settings.subnets:
            more["VpcConfig"] = {"SecurityGroupIds": settings.security_groups, "Subnets": settings.subnets}
        if plan.max_restarts:
            more["RetryStrategy"] = {"MaximumRetryAttempts": min(plan.max_restarts, MOST_RETRIES)}
        return training_request(
            TrainingJob(
                name=plan.name,
                role=str(settings.role),
                image=str(settings.image),
                output_path=str(settings.output_path),
                instance_type=f"ml.{plan.cluster.instance}",
                instance_count=plan.nodes,
                volume_gb=settings.volume_gb,
                environment=plan.environment,
                channels=list(_channels(plan)),
                entrypoint=ENTRYPOINT,
                metrics=METRIC_PATTERNS,
                checkpoint_uri=f"{_prefix(plan)}/checkpoints" if plan.nodes == 1 else None,
                max_run=plan.time_limit or MAX_RUN,
                max_wait=_wait(plan) if settings.spot else None,
                spot=settings.spot,
                tags=settings.labels,
                more=more,
            )
        )

    def files(self, plan: LaunchPlan, directory: Path) -> Mapping[str, str]:
        """Return the job and the request."""
        return {REQUEST: json.dumps(self.request(plan), indent=1) + "\n", JOB_FILE: job_text(plan)}

    def record(self, plan: LaunchPlan) -> dict[str, object]:
        """Return the region, and where the job file goes."""
        return {"region": plan.settings.region, "job": f"{_prefix(plan)}/job/{JOB_FILE}"}

    def check_client(self, record: LaunchRecord) -> None:
        """Ask who is asking, and whether the name is free."""
        client = _client(record)
        try:
            client.service("sts").get_caller_identity()
        except Exception as error:
            raise LaunchError(
                f"AWS does not know who is asking, so nothing was submitted: {type(error).__name__}; log in, or set "
                "AWS_PROFILE"
            ) from None
        try:
            described = client.describe(record.name)
        except MachineError:
            return  # there is none
        raise LaunchError(
            f"SageMaker has a training job {record.name} already ({described['TrainingJobStatus']}); give another "
            "launch.name"
        )

    def submit(self, record: LaunchRecord) -> str:
        """Upload the job file and start the job; returns its ARN."""
        client = _client(record)
        request = json.loads((record.directory / REQUEST).read_text(encoding="utf-8"))
        try:
            client.upload((record.directory / JOB_FILE).read_bytes(), record.details["job"])
            return client.start(request)
        except MachineError as error:
            raise LaunchError(str(error)) from None

    def status(self, record: LaunchRecord) -> str:
        """Return the service's word, with the reason of a failure."""
        described = _client(record).describe(record.name)
        words = (described["TrainingJobStatus"], described.get("SecondaryStatus"), described.get("FailureReason"))
        return "  ".join(dict.fromkeys(word for word in words if word))

    def logs(self, record: LaunchRecord) -> str:
        """Return what the containers have printed, each line with its host."""
        return "".join(f"{line}\n" for line in JobLog(_client(record), record.name).new_lines())

    def stop(self, record: LaunchRecord) -> None:
        """Ask the service to stop the job."""
        _client(record).stop(record.name)


def _prefix(plan: LaunchPlan) -> str:
    """Return the prefix of S3 that is this job's own."""
    return f"{str(plan.settings.output_path).rstrip('/')}/{plan.name}"


def _wait(plan: LaunchPlan) -> int:
    return 2 * (plan.time_limit or MAX_RUN)


def _channels(plan: LaunchPlan) -> Iterator[Channel]:
    yield _s3_channel(JOB_CHANNEL, f"{_prefix(plan)}/job")
    for path, source in plan.settings.mounts.items():
        name = path.removeprefix(INPUTS).strip("/")
        if not path.startswith(INPUTS) or not name or "/" in name or name == JOB_CHANNEL:
            raise ConfigError(f"launch.mounts: {path!r} is no input of SageMaker; use {INPUTS}NAME")
        kind, rest = split_mount(source, ("s3://", "fsx:"), f"launch.mounts.{path}")
        if kind == "s3://":
            yield _s3_channel(name, source)
            continue
        if not plan.settings.subnets:
            raise ConfigError(f"launch.mounts.{path}={source!r}: FSx needs launch.subnets and launch.security_groups")
        system, _, directory = rest.partition("/")
        if not FILE_SYSTEM.fullmatch(system):
            raise ConfigError(
                f"launch.mounts.{path}={source!r}: {system!r} is no file system; use fsx:fs-0123456789abcdef0"
            )
        files = FileSystemDataSource(
            file_system_id=system, file_system_type="FSxLustre", directory_path=f"/{directory}"
        )
        yield Channel(channel_name=name, data_source=DataSource(file_system_data_source=files))


def _s3_channel(name: str, uri: str) -> Channel:
    return Channel(channel_name=name, data_source=DataSource(s3_data_source=S3DataSource(s3_uri=uri)))


def _client(record: LaunchRecord) -> ServiceClient:
    """Return the service of the record's region, or of boto3's own.

    Raises:
        MachineError: boto3 is not installed.
    """
    region = record.details.get("region")
    try:
        return ServiceClient(importlib.import_module("boto3").Session(region_name=region))
    except ImportError:
        raise LaunchError(
            "SageMaker is reached through boto3, which is not installed; run `pip install 'shardwise[sagemaker]'`"
        ) from None
