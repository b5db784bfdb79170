"""Containers as SageMaker lays them out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardwise.sagemaker.container import Container, find_container

RESOURCES = {
    "current_host": "algo-2",
    "current_instance_type": "ml.p4d.24xlarge",
    "hosts": ["algo-2", "algo-1", "algo-10"],
    "network_interface_name": "eth0",
}


def lay_out(base: Path, hyperparameters: dict[str, Any], channels: tuple[str, ...] = (), **resources: Any) -> Container:
    """Write what the service writes, and return what is read of it."""
    config = base / "input" / "config"
    config.mkdir(parents=True)
    encoded = {name: value if isinstance(value, str) else json.dumps(value) for name, value in hyperparameters.items()}
    (config / "hyperparameters.json").write_text(json.dumps(encoded))
    (config / "resourceconfig.json").write_text(json.dumps(RESOURCES | resources))
    (config / "inputdataconfig.json").write_text(json.dumps({name: {"TrainingInputMode": "File"} for name in channels}))
    for name in channels:
        (base / "input" / "data" / name).mkdir(parents=True)
    container = find_container({"SAGEMAKER_BASE_DIR": str(base)})
    assert container is not None
    return container
