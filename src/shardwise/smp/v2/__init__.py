"""SMP's Python API, version 2: `torch.sagemaker` under `shardwise run`, or `import shardwise.smp.v2 as tsm`.

Version 2 is torch's own FSDP (`FullyShardedDataParallel`) with degrees: the script wraps and trains its model, and this
package gives FSDP its groups, splits the model over tensor and context ranks, and keeps checkpoints and norms right.
"""

from __future__ import annotations

from typing import Any

from shardwise.smp.v2.attention_choice import fused_attention_for_flash
from shardwise.smp.v2.fully_sharded import fsdp_by_degrees, take_state_dict_settings
from shardwise.smp.v2.group_state import take_groups_of_any_ranks
from shardwise.smp.v2.offloading import offload_of_checkpointed_inputs
from shardwise.smp.v2.removed_names import names_of_transformers_4
from shardwise.smp.v2.session import state
from shardwise.smp.v2.transforming import transform

# What `init` changes in torch and transformers, and `tsm.state.reset` gives back.
CHANGES = (fsdp_by_degrees, offload_of_checkpointed_inputs, fused_attention_for_flash, names_of_transformers_4)

# Scripts use these parts of torch before `init` too.
take_groups_of_any_ranks()
take_state_dict_settings()

__all__ = ["init", "is_initialized", "state", "transform"]


def init(config: Any = None) -> None:
    """Take a place among the ranks; `config` is a dict of SMP's version 2 parameters or the path of a JSON file.

    The launcher's `SM_HP_MP_PARAMETERS` wins over `config`; degrees set on `state` before win over both.

    Raises:
        ConfigError: a parameter is unknown, wrong or refused, or the ranks do not fit the degrees.
    """
    state.init(config)
    for change in CHANGES:
        state.until_reset(change())


def is_initialized() -> bool:
    """Tell if `init` was called."""
    return state.initialized
