"""Fields of the objects that targets write, names and types as the projects' own APIs have them.

A table is a nested dict; `None` behind a type stands for nothing. `[table]` is a list, `{str: table}` a mapping with
free names. Sources: Kubeflow Trainer 2.3 and training-operator 1.9 (`pkg/apis`), JobSet 0.12 (`jobset_types.go`),
HyperPod CLI 3.9 (its templates), SkyPilot (`yaml-spec.rst`), Kubernetes 1.32 (core/v1, batch/v1).
"""

from __future__ import annotations

from typing import Any

NAME = str
METADATA = {"name": str, "namespace": str, "labels": {str: str}, "annotations": {str: str}}
QUANTITY = (int, str)
ENV = {
    "name": str,
    "value": str,
    "valueFrom": {"secretKeyRef": {"name": str, "key": str}, "fieldRef": {"fieldPath": str}},
}
MOUNT = {"name": str, "mountPath": str, "readOnly": bool}
VOLUME = {
    "name": str,
    "configMap": {"name": str},
    "emptyDir": {"medium": str, "sizeLimit": str},
    "persistentVolumeClaim": {"claimName": str},
    "hostPath": {"path": str},
}
RESOURCES = {"requests": {str: QUANTITY}, "limits": {str: QUANTITY}}
CONTAINER = {
    "name": str, "image": str, "command": [str], "args": [str], "env": [ENV], "resources": RESOURCES,
    "volumeMounts": [MOUNT], "ports": [{"name": str, "containerPort": int}],
}  # fmt: skip
POD = {
    "terminationGracePeriodSeconds": int, "volumes": [VOLUME], "nodeSelector": {str: str}, "serviceAccountName": str,
    "tolerations": [{"key": str, "operator": str, "effect": str}], "imagePullSecrets": [{"name": str}],
    "restartPolicy": str, "containers": [CONTAINER],
}  # fmt: skip
TEMPLATE = {"metadata": METADATA, "spec": POD}
PATCHED_POD = {
    key: POD[key]
    for key in (
        "terminationGracePeriodSeconds", "volumes", "nodeSelector", "serviceAccountName", "tolerations",
        "imagePullSecrets",
    )
} | {"containers": [{"name": str, "env": [ENV], "volumeMounts": [MOUNT]}]}  # fmt: skip
TRAINER = {
    "image": str, "numNodes": int, "numProcPerNode": int, "command": [str], "args": [str], "env": [ENV],
    "resourcesPerNode": RESOURCES,
}  # fmt: skip
HEAD = {"apiVersion": str, "kind": str, "metadata": METADATA}
PATCHED_JOB = {"name": str, "template": {"spec": {"template": {"metadata": METADATA, "spec": PATCHED_POD}}}}
TRAIN_JOB = HEAD | {
    "spec": {
        "runtimeRef": {"name": str}, "suspend": bool, "trainer": TRAINER, "activeDeadlineSeconds": int,
        "runtimePatches": [
            {"manager": str, "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [PATCHED_JOB]}}}}
        ],
    }
}  # fmt: skip
OVERRIDDEN_POD = {key: value for key, value in PATCHED_POD.items() if key != "terminationGracePeriodSeconds"}
TRAIN_JOB_OF_2_1 = HEAD | {
    "spec": {
        "runtimeRef": {"name": str}, "suspend": bool, "trainer": TRAINER,
        "podTemplateOverrides": [{"targetJobs": [{"name": str}], "metadata": METADATA, "spec": OVERRIDDEN_POD}],
    }
}  # fmt: skip
REPLICA = {"replicas": int, "restartPolicy": str, "template": TEMPLATE}
PYTORCH_JOB = HEAD | {
    "spec": {
        "nprocPerNode": str, "elasticPolicy": {"minReplicas": int, "maxReplicas": int, "rdzvBackend": str},
        "pytorchReplicaSpecs": {"Master": REPLICA, "Worker": REPLICA},
        "runPolicy": {
            "cleanPodPolicy": str, "ttlSecondsAfterFinished": int, "activeDeadlineSeconds": int, "backoffLimit": int,
            "suspend": bool,
        },
    }
}  # fmt: skip
EXIT_CODES = {"containerName": str, "operator": str, "values": [int]}
BATCH_JOB = {
    "parallelism": int, "completions": int, "completionMode": str, "backoffLimit": int, "activeDeadlineSeconds": int,
    "podFailurePolicy": {"rules": [{"action": str, "onExitCodes": EXIT_CODES}]}, "template": TEMPLATE,
}  # fmt: skip
JOB_SET = HEAD | {
    "spec": {
        "suspend": bool,
        "failurePolicy": {
            "maxRestarts": int, "restartStrategy": str,
            "rules": [{"name": str, "action": str, "onJobFailureReasons": [str]}],
        },
        "replicatedJobs": [{"name": str, "replicas": int, "template": {"spec": BATCH_JOB}}],
    }
}  # fmt: skip
LOG_RULE = {
    "name": str, "logPattern": str, "expectedStartCutOffInSeconds": int, "expectedRecurringFrequencyInSeconds": int,
    "stopPattern": str,
}  # fmt: skip
HYPERPOD = HEAD | {
    "spec": {
        "nprocPerNode": str,
        "replicaSpecs": [{"name": str, "replicas": int, "maxReplicas": int, "template": TEMPLATE}],
        "elasticPolicy": {
            "minReplicas": int, "maxReplicas": int, "replicaIncrementStep": int,
            "gracefulShutdownTimeoutInSeconds": int,
        },
        "runPolicy": {
            "cleanPodPolicy": str, "jobMaxRetryCount": int, "activeDeadlineSeconds": int, "suspend": bool,
            "restartPolicy": {"maxFullJobRestarts": int}, "logMonitoringConfiguration": [LOG_RULE],
        },
    }
}  # fmt: skip
CONFIG_MAP = HEAD | {"data": {str: str}}
SKYPILOT = {
    "name": str, "num_nodes": int, "envs": {str: str}, "secrets": {str: None}, "file_mounts": {str: str}, "setup": str,
    "run": str,
    "resources": {
        "infra": str, "accelerators": str, "instance_type": str, "cpus": str, "use_spot": bool, "network_tier": str,
        "image_id": str, "labels": {str: str}, "job_recovery": {"max_restarts_on_errors": int},
    },
}  # fmt: skip


def mismatches(value: Any, table: Any, place: str = "") -> list[str]:
    """Return the places where `value` is not as the table says."""
    if isinstance(table, dict) and isinstance(value, dict):
        if set(table) == {str}:
            return [line for key, part in value.items() for line in mismatches(part, table[str], f"{place}.{key}")]
        unknown = [f"{place}.{key}: no such field" for key in value if key not in table]
        known = (key for key in value if key in table)
        return [*unknown, *(line for key in known for line in mismatches(value[key], table[key], f"{place}.{key}"))]
    if isinstance(table, list) and isinstance(value, list):
        return [line for n, part in enumerate(value) for line in mismatches(part, table[0], f"{place}[{n}]")]
    kinds = table if isinstance(table, tuple) else (type(None) if table is None else table,)
    return [] if type(value) in kinds else [f"{place}: {value!r} is no {table}"]
