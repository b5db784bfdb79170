"""Parts that the Kubernetes targets share: the job as a ConfigMap, the pods, Kueue's labels, and kubectl.

Pods get the job at `/shardwise/job.yaml`. Everything that they read and keep besides comes from mounts or URLs.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from shardwise.errors import ConfigError, LaunchError
from shardwise.launch.client import HalfSubmittedError, require_client, run_client
from shardwise.launch.launch_plan import DerivedValue, LaunchPlan
from shardwise.launch.record import LaunchRecord
from shardwise.launch.targets.target import (
    JOB_FILE,
    LaunchTarget,
    job_text,
    kept_outside,
    manifest_text,
    split_mount,
)

JOB_DIRECTORY = "/shardwise"
START = ("shardwise", "train", f"{JOB_DIRECTORY}/{JOB_FILE}")
LABEL = "shardwise.dev/job"
QUEUE, PRIORITY = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/priority-class"
TOPOLOGY = "kueue.x-k8s.io/podset-{}-topology"
INSTANCE = "node.kubernetes.io/instance-type"
HUGE_PAGES = "5120Mi"  # that libfabric's EFA provider takes, as in AWS's own examples
QUEUED = ("priority", "required_topology", "preferred_topology")  # keys that Kueue alone reads
CONFIG_MAP, MANIFEST = "configmap.yaml", "manifest.yaml"


class KubernetesTarget(LaunchTarget):
    """A custom resource of Kubernetes, given to kubectl.

    Attributes:
        resource: plural and group, as kubectl and `can-i` take them.
    """

    resource: ClassVar[str]
    needs_image = True
    names_jobs = True
    keys: ClassVar[tuple[str, ...]] = (
        "image", "pull_secret", "namespace", "queue", "priority", "required_topology", "preferred_topology",
        "time_limit", "stop_seconds", "mounts", "secrets", "node_selector", "labels", "service_account",
        "shared_memory_gb",
    )  # fmt: skip
    secret_form = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[-._a-zA-Z0-9]+")
    secret_example = "SECRET/KEY of a Kubernetes secret"

    @abstractmethod
    def manifest(self, plan: LaunchPlan) -> dict[str, Any]:
        """Return the object that starts the pods."""

    def finish(self, plan: LaunchPlan) -> LaunchPlan:
        """Check what Kueue and the pods need; note what would be lost with a container."""
        settings, resources = plan.settings, plan.resources
        for label in {LABEL, QUEUE, PRIORITY} & settings.labels.keys():
            way = {QUEUE: "give launch.queue", PRIORITY: "give launch.priority"}.get(label, "leave it out")
            raise ConfigError(f"launch.labels.{label}: {self.name} sets it; {way}")
        for key in QUEUED:
            if getattr(settings, key) is not None and settings.queue is None:
                raise ConfigError(f"launch.{key}={getattr(settings, key)!r} is read by Kueue alone; give launch.queue")
        if settings.queue is not None and not (resources.cpus and resources.memory_gb):
            raise ConfigError(
                f"launch.queue={settings.queue}: Kueue counts quotas from requests of cpu and memory, and "
                f"launch.cluster={settings.cluster} says neither; name an instance type, or give cpus and host_gb in a "
                "cluster file"
            )
        for path in settings.mounts:
            if not path.startswith("/") or path.rstrip("/") in ("", JOB_DIRECTORY, "/dev/shm"):
                raise ConfigError(f"launch.mounts: {path!r} must be a directory of its own in the container, from /")
        volumes_of(plan)  # refuses mounts of other kinds
        return super().finish(replace(plan, notes=(*plan.notes, *kept_outside(plan))))

    def derive(self, plan: LaunchPlan) -> Iterator[DerivedValue]:
        """Yield resources, start, end, queue."""
        settings, resources, where = plan.settings, plan.resources, plan.cluster
        for name, amount in requests_of(plan).items():
            yield DerivedValue(
                name, f"{amount} a pod", RESOURCE_RULES.get(name, f"{where.name}: 90 %, the rest is the node's own")
            )
        rule = "launch.shared_memory_gb" if settings.shared_memory_gb else "a quarter of the node's memory; else 16"
        yield DerivedValue("/dev/shm", f"{resources.shared_memory_mb / 1024:g} GiB", rule)
        yield DerivedValue("terminationGracePeriodSeconds", str(settings.stop_seconds), "launch.stop_seconds")
        if plan.time_limit is not None:
            yield DerivedValue(
                "activeDeadlineSeconds", str(plan.time_limit), f"launch.time_limit {settings.time_limit}"
            )
        if settings.queue is not None:
            yield DerivedValue(QUEUE, settings.queue, "launch.queue; created suspended, Kueue admits it")
        for name, value in node_selector(plan, self.instance_prefix).items():
            given = name in settings.node_selector
            yield DerivedValue(f"node {name}", value, "launch.node_selector" if given else "launch.cluster's instance")

    instance_prefix: ClassVar[str] = ""  # SageMaker's nodes say `ml.` before the type

    def files(self, plan: LaunchPlan, directory: Path) -> Mapping[str, str]:
        """Return the job, its ConfigMap and the manifest."""
        job = job_text(plan)
        config = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {**metadata(plan), "name": config_name(plan.name)},
            "data": {JOB_FILE: job},
        }
        return {JOB_FILE: job, CONFIG_MAP: manifest_text(config), MANIFEST: manifest_text(self.manifest(plan))}

    def record(self, plan: LaunchPlan) -> dict[str, object]:
        """Return the namespace."""
        return {"namespace": plan.settings.namespace}

    def check_client(self, record: LaunchRecord) -> None:
        """Ask whether kubectl may create the object."""
        require_client("kubectl")
        try:
            run_client([*_kubectl(record), "auth", "can-i", "create", self.resource])
        except LaunchError as error:
            raise LaunchError(
                f"kubectl may not create {self.resource} here, so nothing was submitted: {error}. Log in to the "
                "cluster, or give another launch.namespace"
            ) from None

    def submit(self, record: LaunchRecord) -> str:
        """Create the ConfigMap and the object; without the second the first goes again."""
        run_client([*_kubectl(record), "create", "-f", str(record.directory / CONFIG_MAP)])
        try:
            run_client([*_kubectl(record), "create", "-f", str(record.directory / MANIFEST)])
        except LaunchError as error:
            try:
                run_client([*_kubectl(record), "delete", "-f", str(record.directory / CONFIG_MAP)])
            except LaunchError as second:
                raise HalfSubmittedError(
                    f"{error}; its ConfigMap {config_name(record.name)} is still there ({second}); delete it"
                ) from None
            raise
        return f"{self.resource}/{record.name}"

    def status(self, record: LaunchRecord) -> str:
        """Return the newest condition that holds, with its reason."""
        told = run_client([*_kubectl(record), "get", self.resource, record.name, "-o", "json"])
        conditions = json.loads(told).get("status", {}).get("conditions", [])
        holds = [condition for condition in conditions if condition.get("status") == "True"]
        holds.sort(key=lambda condition: condition.get("lastTransitionTime", ""))  # of one second: the last in the list
        return f"{holds[-1]['type']} ({holds[-1].get('reason', '')})" if holds else "Created"

    def logs(self, record: LaunchRecord) -> str:
        """Return the pods' logs, each line with its pod."""
        words = ["logs", "-l", f"{LABEL}={record.name}", "--prefix", "--tail=-1", "--max-log-requests=1000"]
        return run_client([*_kubectl(record), *words])

    def stop(self, record: LaunchRecord) -> None:
        """Delete the object and its ConfigMap; pods get SIGTERM, upon which the state is saved."""
        run_client([*_kubectl(record), "delete", self.resource, record.name, "--wait=false"])
        run_client([*_kubectl(record), "delete", "configmap", config_name(record.name), "--ignore-not-found"])


RESOURCE_RULES = {
    "nvidia.com/gpu": "launch.cluster: all of a node",
    "amd.com/gpu": "launch.cluster: all of a node",
    "vpc.amazonaws.com/efa": "launch.cluster: all of a node's devices",
    "hugepages-2Mi": "EFA's provider takes them",
}


def config_name(name: str) -> str:
    """Return the name of a job's ConfigMap."""
    return f"{name}-job"


def metadata(plan: LaunchPlan) -> dict[str, Any]:
    """Return name, namespace and labels of an object."""
    settings = plan.settings
    made: dict[str, Any] = {"name": plan.name}
    if settings.namespace is not None:
        made["namespace"] = settings.namespace
    return made | {"labels": {LABEL: plan.name, **settings.labels}}


def queued_metadata(plan: LaunchPlan) -> dict[str, Any]:
    """Return `metadata` with Kueue's labels."""
    made, settings = metadata(plan), plan.settings
    for label, value in ((QUEUE, settings.queue), (PRIORITY, settings.priority)):
        if value is not None:
            made["labels"][label] = value
    return made


def requests_of(plan: LaunchPlan) -> dict[str, Any]:
    """Return what a pod asks for of a node."""
    resources = plan.resources
    gpu = "amd.com/gpu" if plan.cluster.accelerator.name.startswith("MI") else "nvidia.com/gpu"
    amounts = {
        gpu: resources.accelerators,
        "vpc.amazonaws.com/efa": resources.efa,
        "hugepages-2Mi": HUGE_PAGES if resources.efa else 0,
        "cpu": resources.cpus,
        "memory": f"{resources.memory_gb}Gi" if resources.memory_gb else 0,
    }
    return {name: amount for name, amount in amounts.items() if amount}


def resources_of(plan: LaunchPlan) -> dict[str, Any]:
    """Return requests and limits of a container; processors have no limit, which would only throttle them."""
    requests = requests_of(plan)
    return {"requests": requests, "limits": {name: amount for name, amount in requests.items() if name != "cpu"}}


def environment_of(plan: LaunchPlan) -> list[dict[str, Any]]:
    """Return the variables of a container, secrets by reference.

    Kubernetes reads `$(NAME)` in a value as a variable, and `$$` as one dollar.
    """
    literal = {name: value.replace("$", "$$") for name, value in plan.environment.items()}
    variables: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in literal.items()]
    for name, reference in plan.settings.secrets.items():
        secret, _, key = reference.partition("/")
        variables.append({"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}})
    return variables


def volumes_of(plan: LaunchPlan) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return a pod's volumes, and where its container has them."""
    size = plan.resources.shared_memory_mb
    limit = f"{size}Mi" if size % 1024 else f"{size // 1024}Gi"
    volumes: list[dict[str, Any]] = [
        {"name": "job", "configMap": {"name": config_name(plan.name)}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": limit}},
    ]
    places: list[dict[str, Any]] = [
        {"name": "job", "mountPath": JOB_DIRECTORY, "readOnly": True},
        {"name": "shared-memory", "mountPath": "/dev/shm"},
    ]
    for number, (path, source) in enumerate(plan.settings.mounts.items()):
        kind, rest = split_mount(source, ("pvc:", "host:"), f"launch.mounts.{path}")
        claim = {"persistentVolumeClaim": {"claimName": rest}}
        volumes.append({"name": f"mount-{number}", **(claim if kind == "pvc:" else {"hostPath": {"path": rest}})})
        places.append({"name": f"mount-{number}", "mountPath": path})
    return volumes, places


def node_selector(plan: LaunchPlan, prefix: str = "") -> dict[str, str]:
    """Return the labels that a node has to have: the instance type of the cluster, and those that are given."""
    instance = plan.cluster.instance
    return ({INSTANCE: f"{prefix}{instance}"} if instance else {}) | plan.settings.node_selector


def limits_of_run(plan: LaunchPlan) -> dict[str, Any]:
    """Return the fields of a run policy that say how long a job may run, and that Kueue admits it."""
    limits: dict[str, Any] = {}
    if plan.time_limit is not None:
        limits["activeDeadlineSeconds"] = plan.time_limit
    if plan.settings.queue is not None:
        limits["suspend"] = True
    return limits


def pod_metadata(plan: LaunchPlan) -> dict[str, Any]:
    """Return labels and Kueue's annotations of a pod."""
    settings = plan.settings
    asked = {"required": settings.required_topology, "preferred": settings.preferred_topology}
    annotations = {TOPOLOGY.format(how): level for how, level in asked.items() if level is not None}
    return {"labels": {LABEL: plan.name, **settings.labels}} | ({"annotations": annotations} if annotations else {})


def pod_spec(plan: LaunchPlan, prefix: str = "") -> dict[str, Any]:
    """Return what a pod has beside its containers."""
    settings = plan.settings
    spec: dict[str, Any] = {"terminationGracePeriodSeconds": settings.stop_seconds, "volumes": volumes_of(plan)[0]}
    if selector := node_selector(plan, prefix):
        spec["nodeSelector"] = selector
    if plan.resources.accelerators:
        spec["tolerations"] = [{"key": next(iter(requests_of(plan))), "operator": "Exists", "effect": "NoSchedule"}]
    if settings.service_account is not None:
        spec["serviceAccountName"] = settings.service_account
    if settings.pull_secret is not None:
        spec["imagePullSecrets"] = [{"name": settings.pull_secret}]
    return spec


def container(plan: LaunchPlan, name: str, command: tuple[str, ...]) -> dict[str, Any]:
    """Return the container of the ranks."""
    return {
        "name": name,
        "image": plan.settings.image,
        "command": list(command),
        "env": environment_of(plan),
        "resources": resources_of(plan),
        "volumeMounts": volumes_of(plan)[1],
    }


def _kubectl(record: LaunchRecord) -> list[str]:
    namespace = record.details.get("namespace")
    return ["kubectl", *(["--namespace", namespace] if namespace else [])]
