"""Ranks, sizes and groups of SMP: tensor, pipeline, reduced data, data and model parallelism, world and host.

`layout.SMP_LETTERS` says which named axes each of SMP's notions spans (developer guide, "ranking mechanism").
"""

from __future__ import annotations

from enum import Enum

import torch.distributed as dist

from shardwise.parallel.layout import smp_axes
from shardwise.smp.v1.session import state


class CommGroup(Enum):
    """Groups for messages."""

    WORLD = "world"
    MP_GROUP = "mp"
    DP_GROUP = "dp"
    TP_GROUP = "tp"
    PP_GROUP = "pp"
    RDP_GROUP = "rdp"


class RankType(Enum):
    """Groups in which the rank of a message is counted."""

    WORLD_RANK = "world"
    MP_RANK = "mp"
    DP_RANK = "dp"
    TP_RANK = "tp"
    PP_RANK = "pp"
    RDP_RANK = "rdp"


WORLD, MP_GROUP, DP_GROUP = CommGroup.WORLD, CommGroup.MP_GROUP, CommGroup.DP_GROUP
TP_GROUP, PP_GROUP, RDP_GROUP = CommGroup.TP_GROUP, CommGroup.PP_GROUP, CommGroup.RDP_GROUP


def group_ranks(group: CommGroup | RankType) -> tuple[int, ...]:
    """Return the global ranks of this rank's group, ascending."""
    return state.layout.smp(group.value)[2]


def torch_group(group: CommGroup) -> dist.ProcessGroup:
    """Return torch's group of `group`."""
    return state.layout.group(*smp_axes(group.value))


def rank() -> int:
    """This process among all."""
    return state.layout.smp("world")[0]


def size() -> int:
    """Number of all processes."""
    return state.layout.smp("world")[1]


def local_rank() -> int:
    """This process among those of its host."""
    return state.layout.smp("local")[0]


def local_size() -> int:
    """Processes of this host."""
    return state.layout.smp("local")[1]


def tp_rank() -> int:
    """Position among the ranks that split each layer's tensors."""
    return state.layout.smp("tp")[0]


def tp_size() -> int:
    """Ranks that split each layer's tensors."""
    return state.layout.smp("tp")[1]


def pp_rank() -> int:
    """Pipeline stage of this rank."""
    return state.layout.smp("pp")[0]


def pp_size() -> int:
    """Pipeline stages."""
    return state.layout.smp("pp")[1]


def rdp_rank() -> int:
    """Position among the ranks that hold the same part of the model."""
    return state.layout.smp("rdp")[0]


def rdp_size() -> int:
    """Ranks that hold the same part of the model."""
    return state.layout.smp("rdp")[1]


def dp_rank() -> int:
    """Position among the ranks of the same stage."""
    return state.layout.smp("dp")[0]


def dp_size() -> int:
    """Ranks of the same stage."""
    return state.layout.smp("dp")[1]


def mp_rank() -> int:
    """Position among the ranks that together hold one copy of the model."""
    return state.layout.smp("mp")[0]


def mp_size() -> int:
    """Ranks that together hold one copy of the model."""
    return state.layout.smp("mp")[1]


def get_tp_group() -> list[int]:
    """Global ranks of the tensor group."""
    return list(group_ranks(CommGroup.TP_GROUP))


def get_pp_group() -> list[int]:
    """Global ranks of the pipeline group."""
    return list(group_ranks(CommGroup.PP_GROUP))


def get_rdp_group() -> list[int]:
    """Global ranks of the reduced data group."""
    return list(group_ranks(CommGroup.RDP_GROUP))


def get_dp_group() -> list[int]:
    """Global ranks of the data group."""
    return list(group_ranks(CommGroup.DP_GROUP))


def get_mp_group() -> list[int]:
    """Global ranks of the model group."""
    return list(group_ranks(CommGroup.MP_GROUP))


def get_world_process_group() -> dist.ProcessGroup:
    """torch's group of all ranks."""
    return torch_group(CommGroup.WORLD)


def get_tp_process_group() -> dist.ProcessGroup:
    """torch's tensor group."""
    return torch_group(CommGroup.TP_GROUP)


def get_pp_process_group() -> dist.ProcessGroup:
    """torch's pipeline group."""
    return torch_group(CommGroup.PP_GROUP)


def get_rdp_process_group() -> dist.ProcessGroup:
    """torch's reduced data group."""
    return torch_group(CommGroup.RDP_GROUP)


def get_dp_process_group() -> dist.ProcessGroup:
    """torch's data group."""
    return torch_group(CommGroup.DP_GROUP)


def get_mp_process_group() -> dist.ProcessGroup:
    """torch's model group."""
    return torch_group(CommGroup.MP_GROUP)


def is_initialized() -> bool:
    """Tell if `smp.init` was called."""
    return state.initialized


def is_tracing() -> bool:
    """Tell if the model's structure is being read; a step's body never runs meanwhile."""
    return state.tracing


def num_microbatches() -> int:
    """Pieces of a batch."""
    return int(state.cfg.microbatches)
