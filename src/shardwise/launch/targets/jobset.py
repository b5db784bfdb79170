"""`jobset`: a JobSet of Kubernetes with one indexed Job, a pod a node."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardwise.errors.exit_codes import PERMANENT
from shardwise.launch.launch_plan import DerivedValue, LaunchPlan
from shardwise.launch.targets.kubernetes import (
    START,
    KubernetesTarget,
    container,
    pod_metadata,
    pod_spec,
    queued_metadata,
)

JOB, CONTAINER = "workers", "trainer"
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


class JobSetTarget(KubernetesTarget):
    """A JobSet of Kubernetes."""

    name = "jobset"
    summary = "a JobSet of Kubernetes"
    resource = "jobsets.jobset.x-k8s.io"
    keys = (*KubernetesTarget.keys, "port")

    def longest_suffix(self, plan: LaunchPlan) -> str:
        """Return that of the last pod, with the letters that the Job puts behind it."""
        return f"-{JOB}-0-{plan.nodes - 1}-xxxxx"

    def derive(self, plan: LaunchPlan) -> Iterator[DerivedValue]:
        """Yield start, meeting point and restarts."""
        yield DerivedValue("start", " ".join(START), "starts the pod's ranks by the PET_* of the manifest")
        yield DerivedValue("rank 0", f"{pod_host_name(plan)}:{plan.port}", "JobSet's host name of the first pod")
        yield DerivedValue("maxRestarts", str(plan.max_restarts), "parallel.max_restarts; all pods start again")
        yield DerivedValue("no restart", "codes 1 and 2, and the deadline", "a mistake would repeat itself")
        yield from super().derive(plan)

    def manifest(self, plan: LaunchPlan) -> dict[str, Any]:
        """Return the JobSet."""
        made = container(plan, CONTAINER, START)
        made["env"] = [*meeting_point(plan), *made["env"]]
        made["ports"] = [{"containerPort": plan.port}]
        pod = {
            "metadata": pod_metadata(plan),
            "spec": {"restartPolicy": "Never", "containers": [made], **pod_spec(plan)},
        }
        codes = {"containerName": CONTAINER, "operator": "In", "values": list(PERMANENT)}
        job: dict[str, Any] = {
            "parallelism": plan.nodes,
            "completions": plan.nodes,
            "completionMode": "Indexed",
            "backoffLimit": 0,  # a failed pod fails the Job, and the JobSet starts all of them again
            "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": codes}]},
            "template": pod,
        }
        if plan.time_limit is not None:
            job["activeDeadlineSeconds"] = plan.time_limit
        spec: dict[str, Any] = {"suspend": True} if plan.settings.queue is not None else {}
        mistake = {
            "name": "mistake",
            "action": "FailJobSet",
            "onJobFailureReasons": ["PodFailurePolicy", "DeadlineExceeded"],
        }
        spec["failurePolicy"] = {"maxRestarts": plan.max_restarts, "rules": [mistake]}
        spec["replicatedJobs"] = [{"name": JOB, "replicas": 1, "template": {"spec": job}}]
        return {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": queued_metadata(plan),
            "spec": spec,
        }


def pod_host_name(plan: LaunchPlan) -> str:
    """Return the host name of the first pod."""
    return f"{plan.name}-{JOB}-0-0.{plan.name}"


def meeting_point(plan: LaunchPlan) -> list[dict[str, Any]]:
    """Return torchrun's variables, which `shardwise train` reads too: nodes, ranks, and where they meet."""
    values = {
        "PET_NNODES": plan.nodes,
        "PET_NPROC_PER_NODE": plan.ranks_of_node,
        "PET_MASTER_ADDR": pod_host_name(plan),
        "PET_MASTER_PORT": plan.port,
    }
    index = {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": INDEX}}}
    return [*({"name": name, "value": str(value)} for name, value in values.items()), index]
