"""Shardwise trains models too large for one accelerator, with the same numbers on every layout, on stock PyTorch.

`Job` says what is wanted, `train` runs it, `verify` proves its numbers against one process. The rooms are listed in
docs/architecture.md; names are imported on first use so that `import shardwise` stays cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.2.0.dev0"

_HOMES = {
    "Job": "shardwise.job.schema",
    "load_job": "shardwise.job.sources",
    "resolve": "shardwise.plan.plan",
    "Plan": "shardwise.plan.plan",
    "Layout": "shardwise.parallel.layout",
    "parallelize": "shardwise.parallel.apply",
    "initialize": "shardwise.training.init",
    "train_step": "shardwise.training.step",
    "Session": "shardwise.training.session",
    "Callback": "shardwise.observe.callback",
    "run_local": "shardwise.launch.local",
    "train": "shardwise.commands.train",
    "verify": "shardwise.commands.verify",
}
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name == "sagemaker":
        return import_module("shardwise.sagemaker")
    if name not in _HOMES:
        raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
