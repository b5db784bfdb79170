"""A distributed model's weights: whole by name, this rank's part, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.checkpoint.state import persistent_buffers
from shardwise.errors import CheckpointError
from shardwise.job.axes import Axis, one_copy_axes
from shardwise.parallel.layout import smp_axes
from shardwise.parallel.tensor_map import Entry
from shardwise.smp.v1.process import state
from shardwise.words import listed

if TYPE_CHECKING:
    from shardwise.smp.v1.model import DistributedModel

PARTIAL = "_smp_is_partial"
HOST = torch.device("cpu")


def marked(weights: dict[str, Any]) -> dict[str, Any]:
    """With the key that says that these are one rank's part."""
    return {**weights, PARTIAL: True}


def is_partial(weights: Mapping[str, Any]) -> bool:
    """Whether these are one rank's part."""
    return bool(weights.get(PARTIAL, False))


def whole_weights(model: DistributedModel, call: str, exact: bool = True) -> dict[str, Tensor]:
    """Whole tensors by name, ties under all their names, persistent buffers too. Collective once distributed, over the
    ranks that hold the model together.

    Args:
        call: what the script has called.
        exact: False takes parameters that are gathered already as they are, maybe in the dtype of computing; collective
            then over the ranks of one copy of the model, which may be called where the reduced data rank is 0.

    Raises:
        MessageError: one of the ranks will not come.
    """
    parallel = model.parallel
    if parallel is None:
        return {name: value.detach().to(HOST) for name, value in model.get_module().state_dict().items()}
    if model.host is not None:
        return {name: value.detach().to(HOST, copy=True) for name, value in model.host.weights().items()}
    gathered = model.gathered and not exact
    state.meeting.assemble(call, state.layout.ranks(*(smp_axes("mp") if gathered else one_copy_axes())))
    found = {name: value.detach().to(HOST, copy=True) for name, value in parallel.wholes(gathered=gathered)}
    found |= _all_buffers(model)
    for group in parallel.facts.ties:
        found |= dict.fromkeys(group[1:], found[group[0]])
    return found


def _all_buffers(model: DistributedModel) -> dict[str, Tensor]:
    mine = {
        name: buffer.detach().to(HOST) for name, buffer in persistent_buffers(model.get_module()) if not buffer.is_meta
    }
    if state.layout.size(Axis.PIPELINE) == 1:
        return mine
    everyone: list[Any] = [None] * state.layout.size(Axis.PIPELINE)
    dist.all_gather_object(everyone, mine, group=state.layout.group(Axis.PIPELINE))
    return {name: buffer for part in everyone for name, buffer in part.items()}


def share_buffers(model: DistributedModel) -> None:
    """The first data rank's persistent numbers, such as running statistics, to the other ones that hold the same.

    DistributedDataParallel does so before each forward. Collective over the data ranks.
    """
    if state.layout.data_ranks == 1:
        return
    group = state.layout.group(*smp_axes("rdp"))
    for _, buffer in persistent_buffers(model.get_module()):
        if buffer.is_floating_point() or buffer.dim() == 0:  # masks stay as they are
            dist.broadcast(buffer, dist.get_process_group_ranks(group)[0], group=group)


def local_weights(model: DistributedModel) -> dict[str, Tensor]:
    """This rank's elements by name, and its persistent buffers."""
    if model.parallel is None:
        return whole_weights(model, "model.local_state_dict")
    model.come_back()
    found = {entry.name: entry.local.to(HOST, copy=True) for entry in model.parallel.tensor_map}
    return found | {name: buffer.detach().to(HOST) for name, buffer in persistent_buffers(model.get_module())}


def cuts_of(model: DistributedModel) -> dict[str, dict[str, Any]]:
    """How the tensors that this rank holds a part of were cut, by name: what puts them together without a model."""
    entries = model.parallel.tensor_map if model.parallel is not None else ()
    return {entry.name: dataclasses.asdict(entry.cut) for entry in entries if entry.cut is not None}


def part_of_weights(model: DistributedModel) -> dict[str, Tensor]:
    """What SMP has on a rank: `local_weights`, or, where the optimizer's state alone is sharded, whole parameters in
    the dtype of computing. Collective over the shard group then, unless an optimizer step has gathered them.

    Raises:
        MessageError: one of its ranks will not come.
    """
    parallel = model.parallel
    if parallel is None or not state.cfg.shard_optimizer_state or state.layout.size(Axis.SHARD) == 1:
        return local_weights(model)
    model.come_back()
    if not model.gathered:
        state.meeting.assemble("model.local_state_dict", state.layout.ranks(Axis.SHARD))
    found = {name: value.to(HOST, copy=True) for name, value in parallel.gathered().items()}
    if not model.gathered:
        parallel.release_gathered()
    return found | {name: buffer.detach().to(HOST) for name, buffer in persistent_buffers(model.get_module())}


def with_ties(model: DistributedModel, weights: Mapping[str, Any]) -> dict[str, Any]:
    """`weights` under all names of a parameter that has several; files hold it once."""
    found = dict(weights)
    for group in _ties(model):
        known = [name for name in group if name in weights]
        found |= {name: weights[known[0]] for name in group if known and name not in weights}
    return found


def _ties(model: DistributedModel) -> Iterable[Iterable[str]]:
    if model.parallel is not None:
        return list(model.parallel.facts.ties)
    groups: dict[int, list[str]] = {}
    for name, parameter in model.get_module().named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return groups.values()


def load_weights(model: DistributedModel, weights: Mapping[str, Any], strict: bool, same: bool) -> None:
    """Whole weights or one rank's part into the module, distributed or not.

    Raises:
        CheckpointError: names or shapes do not fit, and `strict` is True.
    """
    from shardwise.smp.v1.replacement import translate_in

    partial = is_partial(weights)
    if PARTIAL not in weights:
        weights = translate_in(model.get_module(), weights)
    tensors = {name: value for name, value in weights.items() if name != PARTIAL}
    parallel = model.parallel
    if parallel is None:
        try:
            model.get_module().load_state_dict(tensors, strict=strict)
        except RuntimeError as error:
            raise CheckpointError(f"the weights do not fit the model: {error}") from error
        return
    names = parallel.tensor_map.names
    buffers = dict(persistent_buffers(model.get_module()))
    local = {entry.name for entry in parallel.tensor_map}
    if strict:
        known = set(buffers) | set(parallel.facts.parameter_shapes) | set(names)
        _check_names(sorted(local - tensors.keys()), sorted(tensors.keys() - known))
    model.release()
    for entry in parallel.tensor_map:
        if entry.name not in tensors:
            continue
        _load(entry, tensors[entry.name], partial)
    for name, buffer in buffers.items():
        if name in tensors:
            buffer.copy_(tensors[name])


def _load(entry: Entry, value: Tensor, partial: bool) -> None:
    """A rank's part is its elements, or what its shard group holds together."""
    shapes = [tuple(entry.local.shape), tuple(entry.parameter.shape)] if partial else [entry.shape]
    if tuple(value.shape) not in shapes:
        raise CheckpointError(
            f"{entry.name} is {list(value.shape)} in the checkpoint and {list(shapes[-1])} here; it is of other "
            "degrees or another model"
        )
    if not partial:
        entry.store(value.to(entry.local.device))
    elif tuple(value.shape) == shapes[-1]:
        entry.store_part(value)
    else:
        entry.local.copy_(value)


def _check_names(missing: list[str], unknown: list[str]) -> None:
    if missing or unknown:
        what = [f"lack {listed(missing)}"] * bool(missing) + [f"have {listed(unknown)} too"] * bool(unknown)
        raise CheckpointError(f"the weights {' and '.join(what)}; use strict=False to load what fits")
