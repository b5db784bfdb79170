"""A run's state as chunks of logical tensors: parameters, buffers, optimizer state and random generators.

Which slice of which tensor a rank holds is read off the TensorMap. Optimizers of this package say what their state
stands for. Of others, state with the shape of its parameter is sliced as the parameter is, and of another shape (rows
and columns) it is kept whole, beside a whole parameter. State that is one number a parameter goes into the manifest.
When writing, each element has one owner: of ranks that hold the same slice, the one that has least to write so far.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise._torch_compat import accelerator
from shardwise._torch_compat.modules import persistent_buffers
from shardwise.checkpoint.manifest import AVERAGE, PYTHON_NUMBERS, TensorRecord
from shardwise.checkpoint.tensor_chunk import TensorChunk
from shardwise.errors import CheckpointError
from shardwise.job.axes import Axis
from shardwise.job.objects import is_reference
from shardwise.model.stored_dtypes import STORED_DTYPES, TORCH_DTYPES
from shardwise.parallel.logical_state import KeepsForms, StateForm
from shardwise.parallel.model import ParallelModel
from shardwise.parallel.tensor_map import ParameterEntry, Region

OF_GROUP = "group/"  # keys of what an optimizer of the user's own keeps in the group of a parameter
SET_BY_RUN = ("lr", "initial_lr", "weight_decay")  # numbers of a group
Scalars = dict[str, dict[str, tuple[float, str]]]  # parameter -> key -> (value, dtype in the manifest's words)


class Optimizer(Protocol):
    """The part of a ShardedOptimizer that is read here."""

    locals: list[tuple[ParameterEntry, nn.Parameter]]
    inner: torch.optim.Optimizer


@dataclass
class Snapshot:
    """The state that one rank writes: its chunks, and the optimizer's scalars of them."""

    chunks: list[TensorChunk]
    scalars: Scalars


def leaves_out_base(model: ParallelModel) -> bool:
    """Return True where checkpoints hold adapters and what else is trained, and name the directory of the base."""
    return bool(model.facts.adapters) and model.plan.job.model.path is not None


def kept_shapes(model: ParallelModel) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters that checkpoints hold, by name."""
    return model.facts.trained_shapes if leaves_out_base(model) else model.facts.parameter_shapes


def snapshot(model: ParallelModel, optimizer: Optimizer, copies: bool = False) -> Snapshot:
    """Return what this rank owns of the run's state, as it is now; tensors are not copied, but for buffers.

    `copies`: all that it holds, whichever rank owns it.
    """
    chunks: list[TensorChunk] = []
    scalars: Scalars = {}
    states = {entry.name: optimizer.inner.state.get(local, {}) for entry, local in optimizer.locals}
    forms = {entry.name: forms_of(optimizer, local) for entry, local in optimizer.locals}
    averages = model.ema.values if model.ema is not None else {}
    of_groups = _group_numbers(optimizer) if is_reference(model.plan.job.optimizer.name) else {}
    for entry, local in _held(model) if copies else _owned(model):
        chunks += _chunks("model", entry, local)
        if entry.name in averages:
            chunks += _chunks(AVERAGE.rstrip("/"), entry, averages[entry.name])
        for key, value in (*states.get(entry.name, {}).items(), *of_groups.get(entry.name, {}).items()):
            if is_scalar(value):
                scalars.setdefault(entry.name, {})[key] = (float(value), _kind_of_number(value))
            elif key in forms[entry.name]:
                form = forms[entry.name][key]
                regions = form.regions if copies else form.owned
                chunks += _form_chunks(f"optimizer/{key}/{entry.name}", form, value, regions)
            elif value is not None:
                chunks += _state_chunks(f"optimizer/{key}", entry, local, value)
    if copies or dist.get_rank() == 0:
        # A forward may change them (running statistics), unlike the rest, and they are small.
        chunks += [_whole(f"buffer/{name}", buffer.clone()) for name, buffer in persistent_buffers(model.module)]
    return Snapshot([*chunks, *random_chunks(model.device, dist.get_rank())], scalars)


def model_chunks(model: ParallelModel) -> list[TensorChunk]:
    """Every slice of parameters and buffers on this rank, to be filled in place."""
    kept = kept_shapes(model)
    entries = [entry for entry in model.tensor_map if entry.name in kept]
    parameters = [chunk for entry in entries for chunk in _chunks("model", entry, entry.local)]
    return parameters + [_whole(f"buffer/{name}", buffer) for name, buffer in persistent_buffers(model.module)]


def ema_chunks(model: ParallelModel, stored: Mapping[str, TensorRecord]) -> tuple[list[TensorChunk], dict[str, Tensor]]:
    """Empty tensors for the averages of this rank's weights that are `stored`: as chunks, and by name."""
    chunks: list[TensorChunk] = []
    values: dict[str, Tensor] = {}
    for entry in model.ema.entries if model.ema is not None else ():
        if f"{AVERAGE}{entry.name}" in stored:
            values[entry.name] = torch.empty_like(entry.local)
            chunks += _chunks(AVERAGE.rstrip("/"), entry, values[entry.name])
    return chunks, values


def optimizer_chunks(
    optimizer: Optimizer, stored: Mapping[str, TensorRecord], keys: Sequence[str]
) -> tuple[list[TensorChunk], dict[str, dict[str, Tensor]]]:
    """Empty tensors for the state `keys` of every local parameter that has it `stored`: as chunks, by name and key."""
    chunks: list[TensorChunk] = []
    states: dict[str, dict[str, Tensor]] = {}
    for entry, local in optimizer.locals:
        forms = forms_of(optimizer, local)
        for key in keys:
            name = f"optimizer/{key}/{entry.name}"
            record = stored.get(name)
            if record and key in forms:
                form = forms[key]
                state = torch.empty(form.local_shape, dtype=form.dtype, device=local.device)
                states.setdefault(entry.name, {})[key] = state
                chunks += _form_chunks(name, form, state, form.regions)
            elif record:
                shape = record.shape if _is_own_shape(entry, local, record.shape) else local.shape
                weights = stored.get(f"model/{entry.name}")
                # State in the weights' dtype follows them into another one.
                follows = weights is None or weights.dtype == record.dtype
                dtype = local.dtype if follows else TORCH_DTYPES[record.dtype]
                states.setdefault(entry.name, {})[key] = torch.empty(shape, dtype=dtype, device=local.device)
                chunks += _state_chunks(f"optimizer/{key}", entry, local, states[entry.name][key])
    return chunks, states


def average_chunks(
    model: ParallelModel, stored: Mapping[str, TensorRecord], key: str
) -> tuple[list[TensorChunk], dict[str, Tensor]]:
    """Empty tensors for the state `key` of every parameter that has it `stored`, shaped as it: as chunks, by name."""
    kept = [entry for entry in model.tensor_map if f"optimizer/{key}/{entry.name}" in stored]
    states = {entry.name: torch.empty_like(entry.local) for entry in kept}
    return [chunk for entry in kept for chunk in _chunks(f"optimizer/{key}", entry, states[entry.name])], states


def forms_of(optimizer: Optimizer, local: nn.Parameter) -> Mapping[str, StateForm]:
    """Return what state beside a local parameter stands for, by key; nothing where the optimizer does not say."""
    return optimizer.inner.forms(local) if isinstance(optimizer.inner, KeepsForms) else {}


def load_optimizer(optimizer: Optimizer, states: dict[str, dict[str, Tensor]], scalars: Scalars) -> None:
    """Give the torch optimizer its state.

    Not through its `load_state_dict`, which casts numbers to the parameter's dtype: NAdam's running product is fp32.
    """
    names = {id(local): entry.name for entry, local in optimizer.locals}
    for group in optimizer.inner.param_groups:
        on_device = group.get("fused") or group.get("capturable")  # where such kernels read their step counter
        for local in group["params"]:
            name = names.get(id(local), "")
            of_local = scalars.get(name, {})
            numbers = {key: _scalar(*value) for key, value in of_local.items() if not key.startswith(OF_GROUP)}
            of_group = {key.removeprefix(OF_GROUP): value for key, value in of_local.items() if key not in numbers}
            group.update({key: _scalar(*value) for key, value in of_group.items()})
            if on_device:
                numbers = {k: v.to(local.device) if isinstance(v, Tensor) else v for k, v in numbers.items()}
            if name in states or numbers:
                optimizer.inner.state[local] = {**numbers, **states.get(name, {})}


def state_keys(optimizer: torch.optim.Optimizer) -> set[str]:
    """Names of what such an optimizer keeps of a matrix, found by a step of another one of its kind."""
    if members := getattr(optimizer, "members", ()):
        return {key for member in members for key in state_keys(member)}
    known = inspect.signature(type(optimizer)).parameters
    settings = {key: value for key, value in optimizer.defaults.items() if key in known}
    example = nn.Parameter(optimizer.param_groups[0]["params"][0].new_zeros(2, 2))
    example.grad = torch.zeros_like(example)
    other = type(optimizer)([example], **settings)
    other.step()
    return set(other.state[example])


def random_chunks(device: torch.device, rank: int) -> list[TensorChunk]:
    """This rank's generator states: fused attention dropout draws from them, nothing else does."""
    chunks = [_whole(f"random/cpu/{rank}", torch.get_rng_state())]
    if accelerator.is_accelerator(device):
        chunks.append(_whole(f"random/{device.type}/{rank}", accelerator.random_state(device)))
    return chunks


def set_random(device: torch.device, chunks: Sequence[TensorChunk]) -> None:
    """Put generator states that were read back in their place."""
    for chunk in chunks:
        if chunk.name.startswith("random/cpu/"):
            torch.set_rng_state(chunk.tensor)
        elif chunk.name.startswith(f"random/{device.type}/"):
            accelerator.set_random_state(chunk.tensor, device)


def is_scalar(value: Any) -> bool:
    """Return whether optimizer state is one number: a step counter, as a number or a tensor without dims."""
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.dim() == 0)


def _group_numbers(optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    """Return what groups have gained beside the arguments of their optimizer, such as a step, by parameter."""
    names = {id(local): entry.name for entry, local in optimizer.locals}
    given = {*inspect.signature(type(optimizer.inner)).parameters, *SET_BY_RUN}
    numbers: dict[str, dict[str, Any]] = {}
    for group in optimizer.inner.param_groups:
        gained = {key: value for key, value in group.items() if is_scalar(value) and not isinstance(value, bool)}
        for name in [names[id(local)] for local in group["params"] if id(local) in names]:
            numbers[name] = {f"{OF_GROUP}{key}": value for key, value in gained.items() if key not in given}
    return numbers


def _kind_of_number(value: float | Tensor) -> str:
    """Return a number's dtype, or its class in Python: a step may be an exponent, or count something."""
    if isinstance(value, Tensor):
        return STORED_DTYPES[value.dtype]
    return next(name for name, kind in reversed(PYTHON_NUMBERS.items()) if isinstance(value, kind))


def _scalar(value: float, dtype: str) -> float | Tensor:
    if dtype in PYTHON_NUMBERS:
        return PYTHON_NUMBERS[dtype](value)
    return torch.tensor(value, dtype=TORCH_DTYPES[dtype])


def _held(model: ParallelModel) -> list[tuple[ParameterEntry, Tensor]]:
    kept = kept_shapes(model)
    return [(entry, entry.local) for entry in model.tensor_map if entry.local.numel() and entry.name in kept]


def _owned(model: ParallelModel) -> list[tuple[ParameterEntry, Tensor]]:
    """Entries that this rank writes. Ranks that hold the same slices share them out alike, so each has one writer."""
    owned: list[tuple[ParameterEntry, Tensor]] = []
    # Copies, and the axis along which they are split -> bytes given to each of the ranks that hold the same.
    load: dict[tuple[int, Axis | None], list[int]] = {}
    for entry, local in _held(model):
        axis = entry.split.axis if entry.split else None
        shares = load.setdefault((entry.replication, axis), [0] * entry.replication)
        writer = shares.index(min(shares))
        shares[writer] += math.prod(entry.shape)
        if writer == entry.replica:
            owned.append((entry, local))
    return owned


def _chunks(kind: str, entry: ParameterEntry, tensor: Tensor) -> list[TensorChunk]:
    """The slices of `tensor`, which is laid out as the entry's local one."""
    return [
        TensorChunk(f"{kind}/{entry.name}", entry.shape, tuple(p.start for p in region.logical), tensor[region.local])
        for region in entry.regions
        if tensor[region.local].numel()
    ]


def _form_chunks(name: str, form: StateForm, state: Tensor, regions: Sequence[Region]) -> list[TensorChunk]:
    """Return the slices of a state tensor that `regions` of its form name."""
    return [
        TensorChunk(name, form.shape, tuple(part.start for part in region.logical), state[region.local])
        for region in regions
        if state[region.local].numel()
    ]


def _whole(name: str, tensor: Tensor) -> TensorChunk:
    return TensorChunk(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor)


def _state_chunks(kind: str, entry: ParameterEntry, local: Tensor, value: Any) -> list[TensorChunk]:
    """Optimizer state beside `local`: sliced as it is, or of a shape of its own (Adafactor's) where it is not cut."""
    if isinstance(value, Tensor) and value.shape == local.shape:
        return _chunks(kind, entry, value)
    if isinstance(value, Tensor) and _is_own_shape(entry, local, value.shape):
        return [_whole(f"{kind}/{entry.name}", value)]
    raise CheckpointError(
        f"optimizer state {kind.partition('/')[2]!r} of {entry.name!r} is neither a number nor shaped as its "
        "parameter, nor rows or columns of one that is not cut; use an elementwise optimizer such as AdamW"
    )


def _is_own_shape(entry: ParameterEntry, local: Tensor, shape: Sequence[int]) -> bool:
    """Return whether state may have this shape beside an uncut parameter: rows or columns, the other dims 1."""
    if tuple(local.shape) != tuple(entry.shape) or tuple(shape) == tuple(entry.shape):
        return False
    return len(shape) == len(entry.shape) and all(
        own in (1, size) for own, size in zip(shape, entry.shape, strict=True)
    )
