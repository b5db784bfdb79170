"""`trainjob`: a TrainJob of Kubeflow Trainer, version 2.1, or 2.2 and later.

The runtime `launch.runtime` (torch-distributed is shipped) gives the JobSet, and its torch policy the variables PET_*
that `shardwise train` reads in a pod. What the API has no field for (volumes, grace, selectors) goes in as patches of
the runtime's pods: `podTemplateOverrides` in 2.1, `runtimePatches` from 2.2 on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from shardwise.errors import ConfigError
from shardwise.launch.launch_plan import DerivedValue, LaunchPlan
from shardwise.launch.targets.kubernetes import (
    START,
    KubernetesTarget,
    environment_of,
    pod_metadata,
    pod_spec,
    queued_metadata,
    resources_of,
    volumes_of,
)

JOB = "node"  # of the replicated job, and of its container, in every runtime with torch's policy
MANAGER = "shardwise.dev/launcher"


class TrainJobTarget(KubernetesTarget):
    """A TrainJob of Kubeflow Trainer."""

    name = "trainjob"
    summary = "Kubeflow Trainer 2"
    resource = "trainjobs.trainer.kubeflow.org"
    keys = (*KubernetesTarget.keys, "trainer_version", "runtime")

    def longest_suffix(self, plan: LaunchPlan) -> str:
        """Return that of the last pod of the JobSet, with the letters that the Job puts behind it."""
        return f"-{JOB}-0-{plan.nodes - 1}-xxxxx"

    def finish(self, plan: LaunchPlan) -> LaunchPlan:
        """Refuse what 2.1 has no field for; restarts are the runtime's."""
        settings = plan.settings
        if settings.trainer_version == "2.1":
            if plan.time_limit is not None:
                raise ConfigError(
                    f"launch.time_limit={settings.time_limit}: a TrainJob of 2.1 has no deadline; leave it out, or use "
                    "launch.trainer_version=2.2"
                )
            if "stop_seconds" in settings.model_fields_set:
                raise ConfigError(
                    f"launch.stop_seconds={settings.stop_seconds}: a TrainJob of 2.1 cannot set its pods' grace; leave "
                    "it out, or use launch.trainer_version=2.2"
                )
        if settings.port is not None:
            raise ConfigError(f"launch.port={settings.port}: the Trainer opens 29500; leave it out")
        if plan.max_restarts:
            note = (
                f"parallel.max_restarts={plan.max_restarts} is not used: a TrainJob has no field for it; "
                f"failurePolicy.maxRestarts of the runtime {settings.runtime} counts"
            )
            plan = replace(plan, notes=(*plan.notes, note))
        return super().finish(plan)

    def derive(self, plan: LaunchPlan) -> Iterator[DerivedValue]:
        """Yield runtime, start and meeting point."""
        version, runtime = plan.settings.trainer_version, plan.settings.runtime
        yield DerivedValue("runtimeRef.name", runtime, "launch.runtime, which has to be on the cluster")
        patches = "podTemplateOverrides" if version == "2.1" else "runtimePatches"
        yield DerivedValue("patches", patches, f"launch.trainer_version {version}")
        yield DerivedValue("start", " ".join(START), "starts the pod's ranks by the PET_* of the runtime")
        yield DerivedValue("rank 0", f"{plan.name}-{JOB}-0-0.{plan.name}:29500", "set by the Trainer: PET_MASTER_ADDR")
        yield from super().derive(plan)

    def manifest(self, plan: LaunchPlan) -> dict[str, Any]:
        """Return the TrainJob."""
        spec: dict[str, Any] = {"runtimeRef": {"name": plan.settings.runtime}}
        if plan.settings.queue is not None:
            spec["suspend"] = True
        spec["trainer"] = {
            "image": plan.settings.image,
            "numNodes": plan.nodes,
            "numProcPerNode": plan.ranks_of_node,
            "command": list(START),
            "env": environment_of(plan),
            "resourcesPerNode": resources_of(plan),
        }
        if plan.time_limit is not None:
            spec["activeDeadlineSeconds"] = plan.time_limit
        return {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": queued_metadata(plan),
            "spec": spec | self._patches(plan),
        }

    def _patches(self, plan: LaunchPlan) -> dict[str, Any]:
        spec = {**pod_spec(plan), "containers": [{"name": JOB, "volumeMounts": volumes_of(plan)[1]}]}
        if plan.settings.trainer_version == "2.1":
            del spec["terminationGracePeriodSeconds"]  # no field of an override
            override = {"targetJobs": [{"name": JOB}], "metadata": pod_metadata(plan), "spec": spec}
            return {"podTemplateOverrides": [override]}
        template = {"metadata": pod_metadata(plan), "spec": spec}
        job = {"name": JOB, "template": {"spec": {"template": template}}}
        return {
            "runtimePatches": [
                {"manager": MANAGER, "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job]}}}}
            ]
        }
