"""SageMaker's model parallel API on shardwise's engine: `import shardwise.smp as smp` is version 1, `.v2` is version 2.

Names of version 1 are imported on first use, because the import hook below is installed before torch is loaded.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__") and name != "__all__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("shardwise.smp.v1"), name)
