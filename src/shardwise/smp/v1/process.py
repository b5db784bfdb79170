"""What one process of a script knows: its configuration, its place, its model and optimizer.

SMP's API is one of a process: `smp.rank()`, `smp.state.cfg`. This module holds the one object behind it.
"""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardwise.errors import ConfigError
from shardwise.job.axes import axis_degrees, one_copy_axes
from shardwise.kernels.precision import without_instructions
from shardwise.kernels.sums import fp32_sums
from shardwise.launch.environment import detect
from shardwise.launch.process_group import gpus_of_host, process_group
from shardwise.parallel.layout import SMP_LETTERS, Layout, smp_axes
from shardwise.plan.plan import World, precheck
from shardwise.smp.v1.backend import choose, differs
from shardwise.smp.v1.config import Configuration, read_configuration
from shardwise.smp.v1.exceptions import NotInitializedError
from shardwise.smp.v1.meeting import Meeting
from shardwise.training.setup import current_world

if TYPE_CHECKING:
    from shardwise.smp.v1.model import DistributedModel
    from shardwise.smp.v1.optimizer_side import Side

DEVICE_VARIABLE = "SHARDWISE_DEVICE"  # set by `shardwise run --device`


class State:
    """`smp.state`. Before `init` everything but `initialized` raises NotInitializedError.

    Attributes:
        model: the script's distributed model, once it is made.
        optimizer: its optimizer's side that the model sees, once it is made.
        step_count: optimizer-independent count of calls of step functions.
    """

    def __init__(self) -> None:
        self.initialized = False
        self.model: DistributedModel | None = None
        self.optimizer: Side | None = None
        self.step_count = 0
        self.tracing = False
        self._cfg: Configuration | None = None
        self._layout: Layout | None = None
        self._device: torch.device | None = None
        self._meeting: Meeting | None = None
        self._exit = ExitStack()
        # Of older scripts: filled once the model's parameters are split.
        self.param_index_to_name_tp_group: dict[int, dict[int, str]] = {}
        self.param_name_to_index_tp_group: dict[int, dict[str, int]] = {}

    @property
    def module_manager(self) -> SimpleNamespace:
        """For transformers' `save_pretrained`: (SMP's names to its own, and back) of a replaced model's weights."""
        from shardwise.smp.v1.replacement import translate_in, translate_out

        module = None if self.model is None else self.model.get_module()
        both = [] if module is None else [(partial(translate_out, module), partial(translate_in, module))]
        return SimpleNamespace(translate_functions=both)

    @property
    def patch_manager(self) -> SimpleNamespace:
        """For scripts that call modules past SMP, whose methods it replaces: here every class has its own."""
        return SimpleNamespace(get_original_method=lambda name, kind: getattr(kind, name))

    @property
    def cfg(self) -> Configuration:
        """SMP's options by name."""
        if self._cfg is None:
            raise NotInitializedError("smp.state.cfg is read before smp.init(); call smp.init() first")
        return self._cfg

    @property
    def layout(self) -> Layout:
        """Which rank stands where."""
        if self._layout is None:
            raise NotInitializedError("smp is used before smp.init(); call smp.init() first")
        return self._layout

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        if self._device is None:
            raise NotInitializedError("smp is used before smp.init(); call smp.init() first")
        return self._device

    @property
    def meeting(self) -> Meeting:
        """Who waits for whom in messages."""
        if self._meeting is None:
            raise NotInitializedError("smp is used before smp.init(); call smp.init() first")
        return self._meeting

    def init(self, config: Any = None) -> None:
        """Join the other ranks and take a place among them; `config` is SMP's dict of options.

        Raises:
            ConfigError: an option is unknown, wrong or refused, the ranks do not fit the degrees, or the script has
                joined them over NCCL alone.
        """
        if config is not None and not isinstance(config, dict):
            raise ConfigError(f"smp.init takes a dict of options, not {config!r}; pass a dict or nothing")
        self.reset()
        kind = device_type()
        cfg = read_configuration(config, kind)
        job = cfg.base_job()
        name = choose(job.parallel, world_to_come(kind), cfg.notes)
        self._device = self._exit.enter_context(process_group(kind, name))
        self._exit.enter_context(fp32_sums(kind))
        _check_host_memory()
        if note := differs(job.parallel.ddp_dist_backend):
            cfg.notes.append(note)
        if why := without_instructions(job.precision.compute, kind):
            cfg.notes.append(f"smp_options: {why}.")
        world = current_world(self._device)
        with cfg.own_words():
            precheck(job, world)
        degrees, placement = axis_degrees(job, world.size), job.parallel.placement_strategy
        self._layout = Layout(degrees, placement, dist.get_rank(), world.local_size, kind)
        # Here, where all ranks are: a group is made by all, and later only some ask for it.
        for axes in (*map(smp_axes, SMP_LETTERS), one_copy_axes()):
            self._layout.group(*axes)
        self._meeting = Meeting(dist.get_rank())
        self._cfg, self.initialized = cfg, True
        if dist.get_rank() == 0:
            for note in cfg.notes:
                print(f"note: {note}", file=sys.stderr)

    def leave(self) -> None:
        """Let ranks that wait for this one know that it comes no more."""
        if self._meeting is not None:
            self._meeting.leave()

    def reset(self) -> None:
        """Forget everything and leave the other ranks."""
        self.leave()
        self._exit.close()
        self.__init__()  # type: ignore[misc]


def _check_host_memory() -> None:
    """Messages, and what is agreed on, lie in host memory, which torch's NCCL does not carry."""
    if dist.get_backend() == "nccl":
        raise ConfigError(
            "smp.init: the script has joined its ranks over NCCL, which carries no tensors in host memory, and SMP's "
            "messages lie there; call smp.init() before init_process_group, or give that 'cpu:gloo,cuda:nccl'"
        )


def device_type() -> str:
    """What `shardwise run --device` says, or CUDA where there is any."""
    return os.environ.get(DEVICE_VARIABLE) or ("cuda" if torch.cuda.is_available() else "cpu")


def world_to_come(device_type: str) -> World:
    """What the launcher says of it, before the ranks have met."""
    place = detect()
    if place is None:
        return World(1, device_type, 1)
    hosts = -(-place.world_size // place.local_world_size)
    gpus = gpus_of_host(device_type, place)
    return World(place.world_size, device_type, place.local_world_size, hosts=hosts, gpus=gpus)


state = State()
atexit.register(state.reset)
