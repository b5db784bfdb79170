"""SMP's Python API, version 2: `torch.sagemaker` under `shardwise run`, or `import shardwise.smp.v2 as tsm`.

Version 2 is torch's own FSDP (`FullyShardedDataParallel`) with degrees: the script wraps and trains its model, and this
package gives FSDP its groups, splits the model over tensor and context ranks, and keeps checkpoints and norms right.
"""

from __future__ import annotations

from typing import Any

from shardwise.smp.v2 import fully_sharded, group_state
from shardwise.smp.v2.state_handler import state
from shardwise.smp.v2.transforming import transform

group_state.install()
fully_sharded.install_configs()

__all__ = ["init", "is_initialized", "state", "transform"]


def init(config: Any = None) -> None:
    """Take a place among the ranks; `config` is a dict of SMP's version 2 parameters or the path of a JSON file.

    The launcher's `SM_HP_MP_PARAMETERS` wins over `config`; degrees set on `state` before win over both.

    Raises:
        ConfigError: a parameter is unknown, wrong or refused, or the ranks do not fit the degrees.
    """
    state.init(config)


def is_initialized() -> bool:
    """Whether `init` was called."""
    return state.initialized
