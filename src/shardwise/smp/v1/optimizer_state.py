"""The state of a distributed optimizer: this rank's, or whole, and back.

A local state is the torch optimizer's own over the elements that are here. A whole one has whole tensors, under the
numbers that the parameters have in the script's own optimizer, so that it fits any layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.errors import CheckpointError
from shardwise.job.axes import Axis, data_axes, one_copy_axes
from shardwise.parallel.tensor_map import Entry
from shardwise.smp.v1.nesting import to_device
from shardwise.smp.v1.process import state
from shardwise.smp.v1.weights import HOST, PARTIAL

if TYPE_CHECKING:
    from shardwise.smp.v1.optimizer_side import Side


MASTERS = "masters"  # this rank's fp32 elements, where parameters are shown to scripts in 16 bits


def local_state(found: Mapping[str, Any], gather_if_shard: bool) -> dict[str, Any]:
    """The state `found` on this rank, marked; with sharded state and `gather_if_shard` a list of them on reduced data
    rank 0. Collective then."""
    own: dict[str, Any] = to_device({**found, PARTIAL: True}, HOST)
    if gather_if_shard and "state" in own and state.layout.size(Axis.SHARD) > 1:
        line = state.layout.ranks(*data_axes())
        state.meeting.assemble("optimizer.local_state_dict", line)
        everyone: list[Any] = [None] * len(line)
        gathered = {key: own[key] for key in (MASTERS, "state") if key in own}
        dist.all_gather_object(everyone, gathered, group=state.layout.group(*data_axes()))
        if state.layout.smp("rdp")[0] == 0:
            own |= {key: [rank[key] for rank in everyone] for key in gathered}
    return own


def full_state(side: Side) -> dict[str, Any]:
    """Whole tensors by number of the parameter. Collective over the ranks that hold the state together.

    Raises:
        MessageError: one of them will not come.
    """
    ranks = state.layout.ranks(*one_copy_axes())
    state.meeting.assemble("optimizer.state_dict", ranks)
    mine: dict[str, list[Any]] = {}
    for entry, local in side.updated():
        values = side.optimizer.state.get(local, {})
        mine[entry.name] = [_pieces(entry, values)]
    everyone: list[Any] = [None] * len(ranks)
    dist.all_gather_object(everyone, mine, group=state.layout.group(*one_copy_axes()))
    shapes = side.parallel.facts.parameter_shapes if side.parallel is not None else {}
    whole = {
        index: _joined([found for rank in everyone for found in rank.get(name, [])], shapes[name])
        for index, name in enumerate(side.order)
    }
    groups, first = [], 0
    for group, count in zip(side.optimizer.param_groups, side.group_sizes):
        rest = {key: value for key, value in group.items() if key != "params"}
        groups.append({**rest, "params": list(range(first, first + count))})
        first += count
    return {
        "state": {index: values for index, values in whole.items() if values},
        "param_groups": groups,
        PARTIAL: False,
        "scaler": scaler_state(side),
    }


def _pieces(entry: Entry, values: Mapping[str, Any]) -> dict[str, Any]:
    """Of each tensor of the parameter's shape its boxes; other values as they are."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Tensor) and value.shape == entry.local.shape and value.dim():
            found[key] = [(region.logical, value[region.local].to(HOST)) for region in entry.regions]
        else:
            found[key] = value.to(HOST) if isinstance(value, Tensor) else value
    return found


def _joined(pieces: list[dict[str, Any]], shape: tuple[int, ...]) -> dict[str, Any]:
    whole: dict[str, Any] = {}
    for values in pieces:
        for key, value in values.items():
            if not isinstance(value, list):
                whole[key] = value
                continue
            for box, part in value:
                whole.setdefault(key, part.new_zeros(shape))[box] = part
    return whole


def load_state(side: Side, saved: Mapping[str, Any]) -> None:
    """Either of the two kinds of state.

    Raises:
        CheckpointError: it is of another number of ranks, of parameters or of groups.
    """
    saved = dict(saved)
    scaler, partial = saved.pop("scaler", None), saved.pop(PARTIAL, False)
    if side.scaler is not None and scaler:
        side.scaler.scale, side.scaler.good_steps, side.scaler.hysteresis = scaler
    saved = local_of(side, {**saved, PARTIAL: partial})
    kept = saved.pop(MASTERS, [])
    if kept and state.model is not None:
        state.model.release()
    for (_, local), master in zip(side.locals, kept):
        local.data.copy_(master)
    try:
        torch.optim.Optimizer.load_state_dict(side.optimizer, saved)
    except ValueError as error:
        raise CheckpointError(
            f"the optimizer's state does not fit: {error}; it is of other degrees or another model"
        ) from error


def local_of(side: Side, saved: Mapping[str, Any]) -> dict[str, Any]:
    """This rank's of a state that was gathered over ranks, or is whole. Raises CheckpointError for other groups."""
    saved = dict(saved)
    if isinstance(saved.get("state"), list):
        own = {key: saved[key][state.layout.smp("rdp")[0]] for key in (MASTERS, "state") if key in saved}
        saved |= own
    whole = saved.pop(PARTIAL, None) is False
    return _local_of(side, saved) if whole else saved


def _local_of(side: Side, saved: Mapping[str, Any]) -> dict[str, Any]:
    """This rank's elements of whole tensors, under the numbers that the local parameters have."""
    numbers = {name: index for index, name in enumerate(side.order)}
    local: dict[int, Any] = {}
    for index, (entry, parameter) in enumerate(side.updated()):
        values = saved["state"].get(numbers[entry.name], {})
        local[index] = {key: _cut(entry, parameter, value) for key, value in values.items()}
    groups, first = [], 0
    if len(saved["param_groups"]) != len(side.optimizer.param_groups):
        raise CheckpointError(
            f"the optimizer's state has {len(saved['param_groups'])} groups, the optimizer has "
            f"{len(side.optimizer.param_groups)}"
        )
    for old, group in zip(saved["param_groups"], side.optimizer.param_groups):
        count = len(group["params"])
        groups.append({**old, "params": list(range(first, first + count))})
        first += count
    return {"state": {index: values for index, values in local.items() if values}, "param_groups": groups}


def _cut(entry: Entry, parameter: Tensor, value: Any) -> Any:
    if not isinstance(value, Tensor) or tuple(value.shape) != entry.shape or not value.dim():
        return value
    local = torch.empty_like(parameter, dtype=value.dtype, device=HOST)
    for region in entry.regions:
        local[region.local] = value[region.logical]
    return local


def masters(side: Side) -> dict[str, Any]:
    """What a script's file of the model cannot hold: parameters whose optimizer state alone is sharded are shown to it
    as they are gathered."""
    parallel = side.parallel
    if parallel is None or not state.cfg.shard_optimizer_state or parallel.plan.dtypes.compute in ("fp32", "fp64"):
        return {}
    return {MASTERS: [local.detach().clone() for _, local in side.locals]}


def scaler_state(side: Side) -> tuple[float, int, int] | None:
    scaler = side.scaler
    return None if scaler is None else (scaler.scale, scaler.good_steps, scaler.hysteresis)
