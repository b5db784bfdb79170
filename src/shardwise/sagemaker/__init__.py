"""Amazon SageMaker: its training jobs as both versions of its SDK describe them, and what their containers hold.

`PyTorch` is the estimator of version 2, `ModelTrainer` the trainer of version 3, with the classes that their arguments
are made of. Names are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_MODULES = {
    "estimator": ("PyTorch",),
    "inputs": ("FileSystemInput", "InputData", "TrainingInput"),
    "model_trainer": ("MPI", "SMP", "Compute", "Mode", "ModelTrainer", "Networking", "SourceCode", "Torchrun"),
    "shapes": (
        "Channel", "CheckpointConfig", "DataSource", "DatasetSource", "FileSystemDataSource", "InfraCheckConfig",
        "InstanceGroup", "MetricDefinition", "OutputDataConfig", "RemoteDebugConfig", "RetryStrategy", "S3DataSource",
        "SessionChainingConfig", "StoppingCondition", "Tag", "TensorBoardOutputConfig", "TrainingImageConfig",
    ),
}  # fmt: skip
_HOMES = {name: f"shardwise.sagemaker.{module}" for module, names in _MODULES.items() for name in names}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shardwise.sagemaker' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
