"""`pytorchjob`: a PyTorchJob of Kubeflow's training operator, version 1.

The operator sets RANK and WORLD_SIZE for a pod and not for a process; `shardwise train` starts the pod's ranks by the
PET_* beside them. Its exit codes are made for the policy `ExitCode`: a mistake fails the job, a fault is tried again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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


class PyTorchJobTarget(KubernetesTarget):
    """A PyTorchJob of Kubeflow's training operator."""

    name = "pytorchjob"
    summary = "Kubeflow's training operator, version 1"
    resource = "pytorchjobs.kubeflow.org"
    keys = (*KubernetesTarget.keys, "port")

    def longest_suffix(self, plan: LaunchPlan) -> str:
        """Return that of the last worker, or of the master."""
        return f"-worker-{plan.nodes - 2}" if plan.nodes > 1 else "-master-0"

    def derive(self, plan: LaunchPlan) -> Iterator[DerivedValue]:
        """Yield start, meeting point and restarts."""
        yield DerivedValue("start", " ".join(START), "starts the pod's ranks by the operator's PET_*")
        yield DerivedValue("rank 0", f"{plan.name}-master-0:{_port(plan)}", "set by the operator: MASTER_ADDR")
        yield DerivedValue("backoffLimit", str(plan.max_restarts), "parallel.max_restarts")
        yield DerivedValue("restartPolicy", _restart(plan), "with restarts: codes from 128 on, so no mistake")
        yield from super().derive(plan)

    def manifest(self, plan: LaunchPlan) -> dict[str, Any]:
        """Return the PyTorchJob."""
        policy = {"cleanPodPolicy": "Running", "backoffLimit": plan.max_restarts, **limits_of_run(plan)}
        made = container(plan, CONTAINER, START)
        made["ports"] = [{"name": PORT_NAME, "containerPort": _port(plan)}]
        replica = {
            "restartPolicy": _restart(plan),
            "template": {"metadata": pod_metadata(plan), "spec": {"containers": [made], **pod_spec(plan)}},
        }
        replicas = {"Master": {"replicas": 1, **replica}}
        if plan.nodes > 1:
            replicas["Worker"] = {"replicas": plan.nodes - 1, **replica}
        return {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": queued_metadata(plan),
            "spec": {
                "nprocPerNode": str(plan.ranks_of_node),
                "runPolicy": policy,
                "pytorchReplicaSpecs": replicas,
            },
        }


def _port(plan: LaunchPlan) -> int:
    return plan.settings.port or PORT


def _restart(plan: LaunchPlan) -> str:
    return "ExitCode" if plan.max_restarts else "Never"
