"""The state of a distributed optimizer: this rank's, or whole, and back.

A local state is the torch optimizer's own over the elements that are here. A whole one has whole tensors, under the
numbers that the parameters have in the script's own optimizer, so that it fits any layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.errors import CheckpointError
from shardwise.job.axes import Axis, data_axes, one_copy_axes
from shardwise.parallel.tensor_map import ParameterEntry
from shardwise.smp.nesting import to_device
from shardwise.smp.v1.host import HOST
from shardwise.smp.v1.optimizer_parameters import OptimizerParameters
from shardwise.smp.v1.session import SmpSessionV1
from shardwise.smp.v1.weights import PARTIAL

MASTERS = "masters"  # this rank's fp32 elements, where parameters are shown to scripts in 16 bits


def local_optimizer_state(session: SmpSessionV1, state: Mapping[str, Any], gather_if_shard: bool) -> dict[str, Any]:
    """Return the `state` of this rank's optimizer, marked as a part.

    With sharded state and `gather_if_shard` reduced data rank 0 gets a list of all ranks' states. Collective then.
    """
    own: dict[str, Any] = to_device({**state, PARTIAL: True}, HOST)
    if gather_if_shard and "state" in own and session.layout.size(Axis.SHARD) > 1:
        data_ranks = session.layout.ranks(*data_axes())
        session.waits.assemble("optimizer.local_state_dict", data_ranks)
        by_rank: list[Any] = [None] * len(data_ranks)
        gathered = {key: own[key] for key in (MASTERS, "state") if key in own}
        dist.all_gather_object(by_rank, gathered, group=session.layout.group(*data_axes()))
        if session.layout.smp("rdp")[0] == 0:
            own |= {key: [rank[key] for rank in by_rank] for key in gathered}
    return own


def whole_optimizer_state(session: SmpSessionV1, parameters: OptimizerParameters) -> dict[str, Any]:
    """Return whole tensors by number of the parameter. Collective over the ranks that hold the state together.

    Raises:
        MessageError: one of them will not come.
    """
    ranks = session.layout.ranks(*one_copy_axes())
    session.waits.assemble("optimizer.state_dict", ranks)
    local: dict[str, list[Any]] = {}
    for entry, elements in parameters.updated():
        values = parameters.optimizer.state.get(elements, {})
        local[entry.name] = [_regions(entry, values)]
    by_rank: list[Any] = [None] * len(ranks)
    dist.all_gather_object(by_rank, local, group=session.layout.group(*one_copy_axes()))
    shapes = parameters.parallel.facts.parameter_shapes if parameters.parallel is not None else {}
    whole = {
        index: _joined([values for rank in by_rank for values in rank.get(name, [])], shapes[name])
        for index, name in enumerate(parameters.order)
    }
    groups, first = [], 0
    for group, count in zip(parameters.optimizer.param_groups, parameters.group_sizes):
        rest = {key: value for key, value in group.items() if key != "params"}
        groups.append({**rest, "params": list(range(first, first + count))})
        first += count
    return {
        "state": {index: values for index, values in whole.items() if values},
        "param_groups": groups,
        PARTIAL: False,
    }


def _regions(entry: ParameterEntry, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the regions of each tensor of the parameter's shape with their elements; other values as they are."""
    regions: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Tensor) and value.shape == entry.local.shape and value.dim():
            regions[key] = [(region.logical, value[region.local].to(HOST)) for region in entry.regions]
        else:
            regions[key] = value.to(HOST) if isinstance(value, Tensor) else value
    return regions


def _joined(parts: list[dict[str, Any]], shape: tuple[int, ...]) -> dict[str, Any]:
    whole: dict[str, Any] = {}
    for values in parts:
        for key, value in values.items():
            if not isinstance(value, list):
                whole[key] = value
                continue
            for logical, elements in value:
                whole.setdefault(key, elements.new_zeros(shape))[logical] = elements
    return whole


def load_optimizer_state(parameters: OptimizerParameters, saved: Mapping[str, Any]) -> None:
    """Load a state of this rank, as `local_part_of` gives it, into the torch optimizer.

    Raises:
        CheckpointError: it is of another number of ranks or of parameters.
    """
    try:
        torch.optim.Optimizer.load_state_dict(parameters.optimizer, dict(saved))
    except ValueError as error:
        raise CheckpointError(
            f"the optimizer's state does not fit: {error}; it is of other degrees or another model"
        ) from error


def local_part_of(session: SmpSessionV1, parameters: OptimizerParameters, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return this rank's part of a state that was gathered over ranks, or is whole.

    Raises:
        CheckpointError: it is of other groups.
    """
    saved = dict(saved)
    if isinstance(saved.get("state"), list):
        saved |= {key: saved[key][session.layout.smp("rdp")[0]] for key in (MASTERS, "state") if key in saved}
    is_whole = saved.pop(PARTIAL, None) is False
    return _cut_whole(parameters, saved) if is_whole else saved


def _cut_whole(parameters: OptimizerParameters, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return this rank's elements of whole tensors, under the numbers that the local parameters have."""
    numbers = {name: index for index, name in enumerate(parameters.order)}
    local: dict[int, Any] = {}
    for index, (entry, elements) in enumerate(parameters.updated()):
        values = saved["state"].get(numbers[entry.name], {})
        local[index] = {key: _cut(entry, elements, value) for key, value in values.items()}
    groups, first = [], 0
    if len(saved["param_groups"]) != len(parameters.optimizer.param_groups):
        raise CheckpointError(
            f"the optimizer's state has {len(saved['param_groups'])} groups, the optimizer has "
            f"{len(parameters.optimizer.param_groups)}"
        )
    for old, group in zip(saved["param_groups"], parameters.optimizer.param_groups):
        count = len(group["params"])
        groups.append({**old, "params": list(range(first, first + count))})
        first += count
    return {"state": {index: values for index, values in local.items() if values}, "param_groups": groups}


def _cut(entry: ParameterEntry, elements: Tensor, value: Any) -> Any:
    if not isinstance(value, Tensor) or tuple(value.shape) != entry.shape or not value.dim():
        return value
    local = torch.empty_like(elements, dtype=value.dtype, device=HOST)
    for region in entry.regions:
        local[region.local] = value[region.logical]
    return local
