"""The plan of a launch, made of a job and a target: every derived value keeps its rule, as in a Plan.

The cluster is the one that `shardwise plan` reads. Nothing here is written or started.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.errors import ConfigError
from shardwise.job.launch_section import LaunchSection
from shardwise.job.schema import Job
from shardwise.job.sources import validate
from shardwise.plan.fixed_batch import with_fixed_batch
from shardwise.planner.constants.inventory import cluster
from shardwise.planner.formulas.prediction import Cluster
from shardwise.planner.search.search import world_of

PORT = 29500  # torch's and Kubeflow's own
KEPT_FOR_THE_NODE = 0.1  # share of a node's processors and memory that its own services take
SHARED_MEMORY = 0.25  # share of a node's memory for /dev/shm
LEAST_SHARED_MEMORY = 16  # GiB, where the node's memory is not known
NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
HOST_NAME = 63  # letters (RFC 1123)
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class DerivedValue(NamedTuple):
    """A value that a launch derived, and the rule behind it."""

    key: str
    value: str
    rule: str


@dataclass(frozen=True)
class NodeResources:
    """Resources that a container may have of a node; 0 where it is not known.

    Attributes:
        accelerators: GPUs; 0 where ranks compute on processors.
        efa: devices of AWS's Elastic Fabric Adapter.
        cpus: virtual processors.
        memory_gb: GiB.
        shared_memory_mb: MiB of /dev/shm.
    """

    accelerators: int
    efa: int
    cpus: int
    memory_gb: int
    shared_memory_mb: int


@dataclass(frozen=True)
class LaunchPlan:
    """A launch before its files are written: the job, the nodes, and what was derived.

    Attributes:
        job: as the nodes get it, without what is the launch's own.
        settings: the `launch` section of the given job.
        name: of the launched job.
        cluster: the nodes.
        resources: of a node.
        environment: variables of every rank.
        max_restarts: by the target, after a fault.
        time_limit: seconds; None where there is none.
        derived: rows of the table that `--print-plan` shows.
        notes: what its user should know.
    """

    job: Job
    settings: LaunchSection
    name: str
    cluster: Cluster
    resources: NodeResources
    environment: Mapping[str, str]
    max_restarts: int
    time_limit: int | None
    derived: tuple[DerivedValue, ...]
    notes: tuple[str, ...] = ()

    @property
    def nodes(self) -> int:
        """Nodes."""
        return self.cluster.nodes

    @property
    def ranks_of_node(self) -> int:
        """Processes on each node."""
        return self.cluster.per_node

    @property
    def least_nodes(self) -> int | None:
        """Nodes with which the job goes on; None: all stay."""
        return self.settings.least_nodes

    @property
    def most_nodes(self) -> int:
        """Nodes that it may have."""
        return self.settings.most_nodes or self.nodes

    @property
    def is_elastic(self) -> bool:
        """True where nodes come and go."""
        return self.least_nodes is not None

    @property
    def port(self) -> int:
        """Port at which the ranks meet."""
        return self.settings.port or PORT


def plan_launch(job: Job, where: Cluster, default_name: str) -> LaunchPlan:
    """Derive what the launch of `job` on a cluster leaves open.

    Raises:
        ConfigError: a name that is no host name, workers that are not the cluster's ranks, or a time that is none.
    """
    settings = job.launch
    _check_numbers_of_nodes(settings, where)
    resources = _resources(settings, where)
    environment = {**_own_environment(where, job), **settings.environment}
    limit = None if settings.time_limit is None else seconds_of(settings.time_limit)
    plan = LaunchPlan(
        job=job_for_nodes(_with_fixed_batch(job, where), where),
        settings=settings,
        name=_name(settings, default_name),
        cluster=where,
        resources=resources,
        environment=environment,
        max_restarts=job.parallel.max_restarts,
        time_limit=limit,
        derived=(),
    )
    if limit is not None and limit <= settings.stop_seconds:
        raise ConfigError(
            f"launch.time_limit={settings.time_limit}: must be longer than launch.stop_seconds="
            f"{settings.stop_seconds}, in which the state is saved; use more than {settings.stop_seconds} s"
        )
    return plan


def _check_numbers_of_nodes(settings: LaunchSection, where: Cluster) -> None:
    """Refuse numbers of nodes between which those of the cluster are not."""
    least, most = settings.least_nodes, settings.most_nodes
    if least is None and most is not None:
        raise ConfigError(f"launch.most_nodes={most} is read beside launch.least_nodes alone; give that too")
    if least is not None and not least <= where.nodes <= (most or where.nodes):
        raise ConfigError(
            f"launch.least_nodes={least}, launch.most_nodes={most or where.nodes}: launch.cluster={settings.cluster} "
            f"has {where.nodes} node(s), which must be between them"
        )


def _with_fixed_batch(job: Job, where: Cluster) -> Job:
    """Return the job whose batch does not depend on how many nodes of an elastic launch there are."""
    return job if job.launch.least_nodes is None else with_fixed_batch(job, world_of(where))[0]


def given_cluster(job: Job, target: str) -> Cluster:
    """Return the cluster that a job names.

    Raises:
        ConfigError: it names none, or one that is not known.
    """
    if job.launch.cluster is None:
        raise ConfigError(
            f"launch.cluster is not set, and {target} does not say how many nodes there are; give e.g. "
            "--launch.cluster p5.48xlarge:4, or a YAML file as `shardwise plan --cluster` reads it"
        )
    return cluster(job.launch.cluster)


def job_for_nodes(job: Job, where: Cluster) -> Job:
    """Return the job as every node reads it: the launch section is gone, and what the target decides.

    Raises:
        ConfigError: the job's workers or device are others than the cluster's.
    """
    device = world_of(where).device_type
    if job.parallel.workers not in (None, where.size):
        raise ConfigError(
            f"parallel.workers={job.parallel.workers}: launch.cluster={job.launch.cluster} has {where.size} ranks "
            f"({where.nodes} x {where.per_node}); use {where.size} or leave it out"
        )
    if job.parallel.device not in ("auto", device):
        raise ConfigError(
            f"parallel.device={job.parallel.device}: the nodes of launch.cluster={job.launch.cluster} compute on "
            f"{device}; use {device} or leave it out"
        )
    data: dict[str, Any] = job.model_dump(mode="json", exclude_unset=True)
    data.pop("launch", None)
    parallel = data.setdefault("parallel", {})
    for key in ("workers", "max_restarts"):
        parallel.pop(key, None)
    parallel["device"] = device
    data.setdefault("checkpoint", {}).setdefault("resume", "auto")
    return validate(data)


def seconds_of(text: str | int) -> int:
    """Return the seconds of `3600`, `36h`, `1:30:00` or `2-12:00:00`.

    Raises:
        ConfigError: it is none of these, or no time at all.
    """
    if isinstance(text, int):
        return text
    plain = re.fullmatch(r"(\d+)([smhd]?)", text.strip())
    clock = re.fullmatch(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)", text.strip())
    if plain:
        seconds = int(plain[1]) * UNITS[plain[2] or "s"]
    elif clock:
        days, hours, minutes, rest = (int(part or 0) for part in clock.groups())
        seconds = ((days * 24 + hours) * 60 + minutes) * 60 + rest
    else:
        seconds = 0
    if not seconds:
        raise ConfigError(
            f"launch.time_limit={text!r}: must be seconds, HH:MM:SS, DAYS-HH:MM:SS or a number with s, m, h or d; "
            "use e.g. 36h"
        )
    return seconds


def name_of(path: str | Path | None) -> str:
    """Return a job's name after its file: `My Run_2.yaml` -> `my-run-2`."""
    stem = "" if path is None else Path(path).stem
    name = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")
    return name if NAME.fullmatch(name) else f"shardwise-{name}".rstrip("-")


def _name(settings: LaunchSection, default: str) -> str:
    name = settings.name or default
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"launch.name={name!r}: must be lower-case letters, digits and '-', with a letter first; "
            f"use {name_of(name + '.yaml')}"
        )
    return name


def check_length(name: str, longest_suffix: str) -> None:
    """Refuse a name from which the target makes host names that are too long.

    Raises:
        ConfigError: with the longest host name and how short the name has to be.
    """
    host = f"{name}{longest_suffix}"
    if len(host) > HOST_NAME:
        room = HOST_NAME - len(longest_suffix)
        raise ConfigError(
            f"launch.name={name!r}: its host {host!r} has {len(host)} letters, of {HOST_NAME} that a host name may "
            f"have; use at most {room}, e.g. {name[:room].rstrip('-')!r}"
        )


def _resources(settings: LaunchSection, where: Cluster) -> NodeResources:
    share = 1 - KEPT_FOR_THE_NODE
    known = max(1, int(where.host_gb * SHARED_MEMORY)) if where.host_gb else LEAST_SHARED_MEMORY
    return NodeResources(
        accelerators=0 if where.accelerator.name == "CPU" else where.per_node,
        efa=where.efa,
        cpus=max(1, int(where.cpus * share)) if where.cpus else 0,
        memory_gb=max(1, int(where.host_gb * share)) if where.host_gb else 0,
        shared_memory_mb=max(1, round((settings.shared_memory_gb or known) * 1024)),
    )


def _own_environment(where: Cluster, job: Job) -> dict[str, str]:
    variables = {"PYTHONUNBUFFERED": "1"}
    if job.checkpoint.resume not in ("none", "auto"):  # a start after a fault would refuse the run's own checkpoints
        variables["SHARDWISE_RESTART_COUNT"] = "1"
    if where.efa and where.nodes > 1:
        variables |= {"FI_PROVIDER": "efa"}
    return variables


def derived_rows(plan: LaunchPlan, target: str, own: Iterator[DerivedValue]) -> tuple[DerivedValue, ...]:
    """Return the rows of the table: what every launch derives, then the target's own."""
    return (*_common_rows(plan, target), *own, *_last_rows(plan))


def _common_rows(plan: LaunchPlan, target: str) -> Iterator[DerivedValue]:
    where, settings, resources = plan.cluster, plan.settings, plan.resources
    source = f"launch.cluster {settings.cluster}" if settings.cluster else f"{target}: what there is"
    yield DerivedValue("target", target, "--to")
    yield DerivedValue("name", plan.name, "launch.name" if settings.name else "the job's file")
    yield DerivedValue("nodes", str(plan.nodes), source)
    if plan.is_elastic:
        rule = "launch.least_nodes and launch.most_nodes; the batch stays"
        yield DerivedValue("nodes that may be there", f"{plan.least_nodes} to {plan.most_nodes}", rule)
    unit = where.accelerator.name if resources.accelerators else "process(es) on its CPU"
    yield DerivedValue("ranks", str(where.size), f"{plan.nodes} x {plan.ranks_of_node} {unit}, a rank each")
    if settings.image is not None:
        yield DerivedValue("image", settings.image, "launch.image")


def _last_rows(plan: LaunchPlan) -> Iterator[DerivedValue]:
    if plan.job.checkpoint.resume == "auto":
        yield DerivedValue(
            "checkpoint.resume", "auto", "a start goes on from the newest checkpoint, where there is one"
        )
    for name, value in plan.environment.items():
        given = name in plan.settings.environment
        yield DerivedValue(f"env {name}", value, "launch.environment" if given else ENVIRONMENT_RULES[name])
    for name, reference in plan.settings.secrets.items():
        yield DerivedValue(f"env {name}", f"from {reference}", "launch.secrets: by reference")


ENVIRONMENT_RULES = {
    "PYTHONUNBUFFERED": "lines appear when they are printed",
    "FI_PROVIDER": "several nodes with EFA",
    "MASTER_PORT": "launch.port",
    "SHARDWISE_RESTART_COUNT": "a checkpoint of the run's own comes before that of checkpoint.resume",
}
