"""SMP's Python API, version 1, on shardwise's engine: `import shardwise.smp as smp`.

Scripts written against `smdistributed.modelparallel.torch` run unchanged under `shardwise run SCRIPT`.
"""

from __future__ import annotations

from typing import Any

from shardwise.smp import exceptions
from shardwise.smp.v1 import (
    amp,
    nn,
    optimizers,
    patches,
    sharded_data_parallel_checkpoint,
    state_mod,
    utils,
)
from shardwise.smp.v1.messages import allgather, barrier, broadcast, dp_barrier, mp_barrier, recv_from, send
from shardwise.smp.v1.model import DistributedModel
from shardwise.smp.v1.optimizer import DistributedOptimizer
from shardwise.smp.v1.ranks import (
    DP_GROUP,
    MP_GROUP,
    PP_GROUP,
    RDP_GROUP,
    TP_GROUP,
    WORLD,
    CommGroup,
    RankType,
    dp_rank,
    dp_size,
    get_dp_group,
    get_dp_process_group,
    get_mp_group,
    get_mp_process_group,
    get_pp_group,
    get_pp_process_group,
    get_rdp_group,
    get_rdp_process_group,
    get_tp_group,
    get_tp_process_group,
    get_world_process_group,
    is_initialized,
    is_tracing,
    local_rank,
    local_size,
    mp_rank,
    mp_size,
    num_microbatches,
    pp_rank,
    pp_size,
    rank,
    rdp_rank,
    rdp_size,
    size,
    tp_rank,
    tp_size,
)
from shardwise.smp.v1.replacement import register_parameter, tp_register, tp_register_with_module
from shardwise.smp.v1.requests import (
    delay_param_initialization,
    model_creation,
    partition,
    set_activation_checkpointing,
    set_partition,
    set_tensor_parallelism,
    tensor_parallelism,
)
from shardwise.smp.v1.saving import load, resume_from_checkpoint, save, save_checkpoint
from shardwise.smp.v1.session import state
from shardwise.smp.v1.step_outputs import StepOutput
from shardwise.smp.v1.steps import step


def init(config: Any = None) -> None:
    """Join the other ranks with SMP's options; the launcher's `SM_HP_MP_PARAMETERS` wins over `config`.

    Raises:
        ConfigError: an option is unknown, wrong or refused, or the ranks do not fit the degrees.
    """
    state.init(config)


__all__ = [
    "DP_GROUP",
    "MP_GROUP",
    "PP_GROUP",
    "RDP_GROUP",
    "TP_GROUP",
    "WORLD",
    "CommGroup",
    "DistributedModel",
    "DistributedOptimizer",
    "RankType",
    "StepOutput",
    "allgather",
    "amp",
    "barrier",
    "broadcast",
    "delay_param_initialization",
    "dp_barrier",
    "dp_rank",
    "dp_size",
    "exceptions",
    "get_dp_group",
    "get_dp_process_group",
    "get_mp_group",
    "get_mp_process_group",
    "get_pp_group",
    "get_pp_process_group",
    "get_rdp_group",
    "get_rdp_process_group",
    "get_tp_group",
    "get_tp_process_group",
    "get_world_process_group",
    "init",
    "is_initialized",
    "is_tracing",
    "load",
    "local_rank",
    "local_size",
    "model_creation",
    "mp_barrier",
    "mp_rank",
    "mp_size",
    "nn",
    "num_microbatches",
    "optimizers",
    "partition",
    "patches",
    "pp_rank",
    "pp_size",
    "rank",
    "rdp_rank",
    "rdp_size",
    "recv_from",
    "register_parameter",
    "resume_from_checkpoint",
    "save",
    "save_checkpoint",
    "send",
    "set_activation_checkpointing",
    "set_partition",
    "set_tensor_parallelism",
    "sharded_data_parallel_checkpoint",
    "size",
    "state",
    "state_mod",
    "step",
    "tensor_parallelism",
    "tp_rank",
    "tp_register",
    "tp_register_with_module",
    "tp_size",
    "utils",
]
