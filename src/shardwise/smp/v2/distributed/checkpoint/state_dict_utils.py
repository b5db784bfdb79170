"""State dicts of this rank's own shards, whose tensors are the live ones."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, OptimStateDictConfig, StateDictConfig, StateDictType

from shardwise.errors import ConfigError
from shardwise.smp.v2.grad_norm import plain_name
from shardwise.smp.v2.session import state


class SMStateDictType(enum.Enum):
    """Kinds of state dict that `sm_state_dict_type` gives."""

    SM_LOCAL_STATE_DICT = "local"


@contextmanager
def sm_state_dict_type(
    model: nn.Module,
    state_dict_type: SMStateDictType | StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> Iterator[None]:
    """Let `model.state_dict()` be of that type.

    SM_LOCAL_STATE_DICT: this rank's shards by name, live, so that `load` fills the model itself; it has no configs.
    Torch's types: as in `FullyShardedDataParallel.state_dict_type`, which gets the configs.

    Raises:
        ConfigError: the type is none of these, or a config comes with the first.
    """
    if isinstance(state_dict_type, StateDictType):
        inside = FullyShardedDataParallel.state_dict_type(
            model, state_dict_type, state_dict_config, optim_state_dict_config
        )
    elif state_dict_type is not SMStateDictType.SM_LOCAL_STATE_DICT or state_dict_config or optim_state_dict_config:
        raise ConfigError(
            f"sm_state_dict_type: state_dict_type={state_dict_type!r} must be SMStateDictType.SM_LOCAL_STATE_DICT, "
            "without configs, or one of torch.distributed.fsdp.StateDictType"
        )
    else:
        inside = _local_state_dict(model)
    with inside:
        yield


@contextmanager
def _local_state_dict(model: nn.Module) -> Iterator[None]:
    module: Any = model

    def local(*args: Any, **kwargs: Any) -> dict[str, Any]:
        values = [*model.named_parameters(), *model.named_buffers()]
        return {plain_name(name): value.detach() for name, value in values}

    @torch.no_grad()
    def fill(state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        for name, value in local().items():
            value.copy_(state_dict[name])

    module.state_dict, module.load_state_dict = local, fill
    try:
        yield
    finally:
        del module.state_dict, module.load_state_dict


@dataclass
class _Interval:
    """Steps between saves, and the durations behind it, in seconds: the slowest rank's medians.

    Attributes:
        interval: steps between saves; 0: not known yet.
        step_duration: of a step without a save.
        step_ckpt_duration: of a step that begins one.
        ckpt_preprocessing_duration: of the copy to host memory, which is waited for.
        ckpt_io_duration: of the writing, which goes on beside training.
    """

    interval: int = 0
    step_duration: float = 0.0
    step_ckpt_duration: float = 0.0
    ckpt_preprocessing_duration: float = 0.0
    ckpt_io_duration: float = 0.0


def compute_auto_checkpoint_interval(
    step_durations: Sequence[float],
    step_ckpt_durations: Sequence[float],
    ckpt_preprocessing_durations: Sequence[float],
    ckpt_io_durations: Sequence[float],
) -> _Interval:
    """Return the most frequent saves that do not wait for one another: ceil((copy + writing) / step) steps. Collective.

    Each argument holds one duration in seconds for each step that was measured, and at least one.

    Raises:
        ConfigError: nothing was measured.
    """
    measured = (step_durations, step_ckpt_durations, ckpt_preprocessing_durations, ckpt_io_durations)
    if not all(measured):
        raise ConfigError("compute_auto_checkpoint_interval: each of its lists needs at least one duration")
    local = torch.tensor([median(durations) for durations in measured], dtype=torch.float64)
    slowest = local.to(state.device) if state.initialized else local
    if dist.is_initialized():
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
    step, with_save, copy, writing = slowest.tolist()
    return _Interval(max(1, math.ceil((copy + writing) / max(step, 1e-9))), step, with_save, copy, writing)


@torch.no_grad()
def init_optim_state(optimizer: torch.optim.Optimizer, skip_empty_param: bool = True) -> None:
    """Make the optimizer's state, as its first step does, without a change of parameters; for `load` to fill."""
    if optimizer.state:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    kept = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        wanted = parameter.requires_grad and (parameter.numel() > 0 or not skip_empty_param)
        parameter.grad = torch.zeros_like(parameter) if wanted else None
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for parameter, gradient in zip(parameters, kept, strict=True):
        parameter.grad = gradient
