"""The `launch` section of a job: where `shardwise launch` starts it, and what a cluster has to be told besides.

Which of these keys a target uses is said by the target (`shardwise.launch.targets`); any other that is set is refused.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shardwise.job.section import Section, UserPath


class LaunchSection(Section):
    """Needs of `shardwise launch` beside the job. No other command reads it; it changes no number."""

    name: str | None = Field(
        default=None,
        description="Name of the launched job; unset: that of the job's file. Lower-case letters, digits and `-`.",
    )
    cluster: UserPath | None = Field(
        default=None,
        description="Nodes to start on, as `shardwise plan --cluster` takes them: `p5.48xlarge:4`, `h200:8`, `cpu:2` "
        "or a YAML file.",
    )
    least_nodes: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description="Nodes with which the job goes on when others go away, for `pytorchjob`, `hyperpod` and `ssh`; "
        "unset: all of `cluster` stay.",
    )
    most_nodes: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description="Nodes to which it may grow, with `least_nodes` on `pytorchjob` and `hyperpod`; unset: those of "
        "`cluster`.",
    )
    image: str | None = Field(
        default=None, description="Container image with shardwise in it; needed where nodes start containers."
    )
    pull_secret: str | None = Field(
        default=None, description="Kubernetes secret with the credentials of the image's registry."
    )
    namespace: str | None = Field(default=None, description="Kubernetes namespace; unset: the client's own.")
    queue: str | None = Field(default=None, description="Kueue's queue on Kubernetes; Slurm's partition.")
    priority: str | None = Field(
        default=None, description="Kueue's priority class of the workload; Slurm's quality of service."
    )
    account: str | None = Field(default=None, description="Slurm's account.")
    required_topology: str | None = Field(
        default=None, description="Node label, such as a block's or rack's, within which Kueue has to place all pods."
    )
    preferred_topology: str | None = Field(
        default=None, description="The same, where other places are taken if there is no room."
    )
    time_limit: str | Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Longest run: seconds, `HH:MM:SS`, `DAYS-HH:MM:SS`, or `36h`, `90m`, `2d`."
    )
    stop_seconds: Annotated[int, Field(ge=1)] = Field(
        default=300,
        description="Seconds that a run has to save its state: Slurm's signal comes so long before the time limit, and "
        "a pod gets so long to end.",
    )
    port: Annotated[int, Field(ge=1, le=65535)] | None = Field(
        default=None, description="Port at which the ranks meet on the first node; unset: 29500."
    )
    mounts: dict[str, str] = Field(
        default={},
        description="Directory in the container -> what is there: `pvc:CLAIM` or `host:/PATH` on Kubernetes, a path of "
        "the nodes under Slurm, `s3://…` or a local path for SkyPilot, `s3://…` or `fsx:FILE-SYSTEM/PATH` for "
        "SageMaker, whose directories are `/opt/ml/input/data/CHANNEL`.",
    )
    environment: dict[str, str] = Field(
        default={}, description="Environment variables of every rank. Secrets are refused here; see `secrets`."
    )
    secrets: dict[str, str] = Field(
        default={},
        description="Environment variable -> where its value is kept: `SECRET/KEY` of a Kubernetes secret; "
        "`file:/PATH` on the nodes under Slurm or ssh; `env:NAME` of the submitting shell for SkyPilot.",
    )
    setup: list[str] = Field(
        default=[], description="Lines of bash on every node before the start, e.g. `source /opt/venv/bin/activate`."
    )
    hosts: list[str] = Field(default=[], description="Hosts for `ssh`, as ssh takes them; the first one has rank 0.")
    node_selector: dict[str, str] = Field(default={}, description="Labels that a Kubernetes node has to have.")
    labels: dict[str, str] = Field(
        default={}, description="Labels of the launched object on Kubernetes, or tags of a SageMaker job."
    )
    service_account: str | None = Field(default=None, description="Kubernetes service account of the pods.")
    shared_memory_gb: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="Size of a pod's `/dev/shm` in GiB; unset: a quarter of the node's memory."
    )
    trainer_version: Literal["2.1", "2.2"] = Field(
        default="2.2",
        description="Version of Kubeflow Trainer for `trainjob`: 2.1 has podTemplateOverrides, 2.2 and later have "
        "runtimePatches.",
    )
    runtime: str = Field(
        default="torch-distributed", description="ClusterTrainingRuntime of a `trainjob`, with torch's policy."
    )
    role: str | None = Field(default=None, description="ARN of the role that a SageMaker job runs as.")
    region: str | None = Field(
        default=None, description="Region of SageMaker or, with its cloud, of SkyPilot: `us-east-1`, `aws/us-east-1`."
    )
    output_path: str | None = Field(
        default=None,
        description="`s3://BUCKET/PREFIX` under which SageMaker keeps the job file, model and checkpoints.",
    )
    volume_gb: Annotated[int, Field(ge=1)] = Field(
        default=30, description="Disk of a SageMaker host in GiB, where its instance type has none of its own."
    )
    subnets: list[str] = Field(default=[], description="Subnets of a SageMaker job, which FSx needs.")
    security_groups: list[str] = Field(default=[], description="Security groups of a SageMaker job, likewise.")
    spot: bool = Field(default=False, description="Capacity that may be taken away, on SkyPilot and SageMaker.")
