"""`hyperpod`: a HyperPodPyTorchJob of SageMaker HyperPod on Kubernetes.

HyperPod finds hung jobs by the lines that they print, so the manifest says which lines those are and how often they
come. Its own agent, `hyperpodrun`, starts the ranks in place of torchrun; the image needs it. The agent kills ranks
unless it is told to ask them first. Where nodes come and go it sends them USR1, and starts them again by another count.
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
from shardwise.observe.log_patterns import END_LINE, STEP_LINE

REPLICA = "pod"
AGENT_PORT = 8080  # at which the operator calls it
START_SECONDS = 3600  # until the first step: image, model and data are fetched meanwhile


class HyperPodTarget(KubernetesTarget):
    """A HyperPodPyTorchJob of SageMaker HyperPod."""

    name = "hyperpod"
    summary = "SageMaker HyperPod on Kubernetes"
    resource = "hyperpodpytorchjobs.sagemaker.amazonaws.com"
    instance_prefix = "ml."
    keys = (*KubernetesTarget.keys, "least_nodes", "most_nodes")

    def longest_suffix(self, plan: LaunchPlan) -> str:
        """Return that of the last pod."""
        return f"-{REPLICA}-{plan.most_nodes - 1}"

    def derive(self, plan: LaunchPlan) -> Iterator[DerivedValue]:
        """Yield start, restarts and what is watched in the log."""
        yield DerivedValue("start", " ".join(_start(plan)), "HyperPod's agent starts the ranks; the image needs it")
        rule = "launch.stop_seconds: ranks are asked to save their state, and then killed"
        yield DerivedValue("--shutdown-timeout", str(plan.settings.stop_seconds), rule)
        yield DerivedValue("jobMaxRetryCount", str(plan.max_restarts), "parallel.max_restarts")
        yield DerivedValue("first step within", f"{START_SECONDS} s", "image, model and data are fetched meanwhile")
        job = plan.job
        rule = f"observe.log_every {job.observe.log_every} x parallel.timeout_seconds {job.parallel.timeout_seconds}"
        yield DerivedValue("a step's line every", f"{_pause(plan)} s", rule)
        yield from super().derive(plan)

    def manifest(self, plan: LaunchPlan) -> dict[str, Any]:
        """Return the HyperPodPyTorchJob."""
        policy = {
            "cleanPodPolicy": "None",
            "jobMaxRetryCount": plan.max_restarts,
            **limits_of_run(plan),
            "restartPolicy": {"maxFullJobRestarts": plan.max_restarts},
            "logMonitoringConfiguration": [log_rule(plan)],
        }
        made = container(plan, "pytorch", _start(plan))
        made["ports"] = [{"name": "agent", "containerPort": AGENT_PORT}]
        template = {
            "metadata": pod_metadata(plan),
            "spec": {"containers": [made], **pod_spec(plan, self.instance_prefix)},
        }
        replica = {"name": REPLICA, "replicas": plan.nodes, "template": template}
        if plan.is_elastic:
            replica["maxReplicas"] = plan.most_nodes
        return {
            "apiVersion": "sagemaker.amazonaws.com/v1",
            "kind": "HyperPodPyTorchJob",
            "metadata": queued_metadata(plan),
            "spec": {
                "nprocPerNode": str(plan.ranks_of_node),
                "replicaSpecs": [replica],
                **_elastic_policy(plan),
                "runPolicy": policy,
            },
        }


def log_rule(plan: LaunchPlan) -> dict[str, Any]:
    """Return the rule by which HyperPod takes a run as hung: a step's line is late, and the run has not ended."""
    return {
        "name": "steps",
        "logPattern": f".*{STEP_LINE}.*",
        "expectedStartCutOffInSeconds": START_SECONDS,
        "expectedRecurringFrequencyInSeconds": _pause(plan),
        "stopPattern": f".*({END_LINE}).*",
    }


def _elastic_policy(plan: LaunchPlan) -> dict[str, Any]:
    if not plan.is_elastic:
        return {}
    numbers = {"minReplicas": plan.least_nodes, "maxReplicas": plan.most_nodes, "replicaIncrementStep": 1}
    return {"elasticPolicy": {**numbers, "gracefulShutdownTimeoutInSeconds": plan.settings.stop_seconds}}


def _pause(plan: LaunchPlan) -> int:
    """Return the longest time between two lines of steps: no step takes longer than a collective may."""
    return plan.job.observe.log_every * plan.job.parallel.timeout_seconds


def _start(plan: LaunchPlan) -> tuple[str, ...]:
    return (
        "hyperpodrun",
        f"--nnodes={plan.nodes}",  # of an elastic job too: the operator says the number when it starts the ranks
        f"--nproc-per-node={plan.ranks_of_node}",
        "--shutdown-signal=SIGTERM",
        f"--shutdown-timeout={plan.settings.stop_seconds}",
        "--no-python",
        *START,
    )
