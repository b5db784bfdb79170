"""`pytorchjob`: a PyTorchJob of Kubeflow's training operator, version 1.

The operator sets RANK and WORLD_SIZE for a pod and not for a process; `shardwise train` starts the pod's ranks by the
PET_* beside them. Its exit codes are made for the policy `ExitCode`: a mistake fails the job, a fault is tried again.
Where nodes come and go all pods are workers, whose numbers the operator leaves in a label alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardwise.errors import ConfigError
from shardwise.launch.launch_plan import DerivedValue, LaunchPlan
from shardwise.launch.targets.kubernetes import (
    START,
    KubernetesTarget,
    container,
    limits_of_run,
    pod_metadata,
    pod_spec,
    queued_metadata,
)

CONTAINER = "pytorch"  # the operator looks for this name
PORT_NAME, PORT = "pytorchjob-port", 23456
NUMBER = "metadata.labels['training.kubeflow.org/replica-index']"


class PyTorchJobTarget(KubernetesTarget):
    """A PyTorchJob of Kubeflow's training operator."""

    name = "pytorchjob"
    summary = "Kubeflow's training operator, version 1"
    resource = "pytorchjobs.kubeflow.org"
    keys = (*KubernetesTarget.keys, "port", "least_nodes", "most_nodes")

    def longest_suffix(self, plan: LaunchPlan) -> str:
        """Return that of the last worker, or of the master."""
        if plan.is_elastic:
            return f"-worker-{plan.most_nodes - 1}"
        return f"-worker-{plan.nodes - 2}" if plan.nodes > 1 else "-master-0"

    def finish(self, plan: LaunchPlan) -> LaunchPlan:
        """Refuse pods that come and go, and may not come back."""
        if plan.is_elastic and not plan.max_restarts:
            raise ConfigError(
                f"launch.least_nodes={plan.least_nodes}: parallel.max_restarts=0 ends the job with the first pod that "
                "is lost; set it to how many losses and faults the job may have"
            )
        return super().finish(plan)

    def derive(self, plan: LaunchPlan) -> Iterator[DerivedValue]:
        """Yield start, meeting point and restarts."""
        yield DerivedValue("start", " ".join(_start(plan)), "starts the pod's ranks by the operator's PET_*")
        if plan.is_elastic:
            rule = "set by the operator: PET_RDZV_ENDPOINT"
            yield DerivedValue("rank 0", f"{plan.name}-worker-0:{_port(plan)}", rule)
            yield DerivedValue("PET_NODE_RANK", "replica-index", "the label of a pod; the operator sets no variable")
        else:
            yield DerivedValue("rank 0", f"{plan.name}-master-0:{_port(plan)}", "set by the operator: MASTER_ADDR")
        yield DerivedValue("backoffLimit", str(plan.max_restarts), "parallel.max_restarts")
        yield DerivedValue("restartPolicy", _restart(plan), "with restarts: codes from 128 on, so no mistake")
        yield from super().derive(plan)

    def manifest(self, plan: LaunchPlan) -> dict[str, Any]:
        """Return the PyTorchJob."""
        policy = {"cleanPodPolicy": "Running", "backoffLimit": plan.max_restarts, **limits_of_run(plan)}
        made = container(plan, CONTAINER, _start(plan))
        made["ports"] = [{"name": PORT_NAME, "containerPort": _port(plan)}]
        if plan.is_elastic:
            made["env"].append({"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": NUMBER}}})
        replica = {
            "restartPolicy": _restart(plan),
            "template": {"metadata": pod_metadata(plan), "spec": {"containers": [made], **pod_spec(plan)}},
        }
        return {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": queued_metadata(plan),
            "spec": {
                "nprocPerNode": str(plan.ranks_of_node),
                "runPolicy": policy,
                **_elastic_policy(plan),
                "pytorchReplicaSpecs": _replicas(plan, replica),
            },
        }


def _replicas(plan: LaunchPlan, replica: dict[str, Any]) -> dict[str, Any]:
    if plan.is_elastic:
        return {"Worker": {"replicas": plan.nodes, **replica}}
    workers = {"Worker": {"replicas": plan.nodes - 1, **replica}} if plan.nodes > 1 else {}
    return {"Master": {"replicas": 1, **replica}, **workers}


def _elastic_policy(plan: LaunchPlan) -> dict[str, Any]:
    if not plan.is_elastic:
        return {}
    numbers = {"minReplicas": plan.least_nodes, "maxReplicas": plan.most_nodes}
    return {"elasticPolicy": {**numbers, "rdzvBackend": "c10d"}}


def _start(plan: LaunchPlan) -> tuple[str, ...]:
    """Return the command of a pod; faults of ranks that no pod's loss explains are counted by the launcher itself."""
    return (*START, "--parallel.max_restarts", str(plan.max_restarts)) if plan.is_elastic else START


def _port(plan: LaunchPlan) -> int:
    return plan.settings.port or PORT


def _restart(plan: LaunchPlan) -> str:
    return "ExitCode" if plan.max_restarts else "Never"
