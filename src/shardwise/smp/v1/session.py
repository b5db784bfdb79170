"""The session of version 1: `smp.state`, with the script's options, its place among the ranks, its model and optimizer.

Model and optimizer are made in either order, so both are found here. What the model asks of the optimizer is
`ModelOptimizer`, and what the optimizer asks of the model is `OptimizedModel`.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, Protocol

import torch.distributed as dist
from torch import nn

from shardwise.collectives.carriers import carries_host_memory
from shardwise.errors import ConfigError
from shardwise.job.axes import axis_degrees, one_copy_axes
from shardwise.kernels.precision import without_instructions
from shardwise.parallel.layout import SMP_LETTERS, Layout, smp_axes
from shardwise.parallel.model import ParallelModel
from shardwise.parallel.tensor_map import ParameterEntry
from shardwise.plan.plan import precheck
from shardwise.smp.backend import choose_backend, joined_backend_note
from shardwise.smp.session import SmpSession, device_type, launched_world, print_notes
from shardwise.smp.v1.config import ModelParallelConfig, read_configuration
from shardwise.smp.v1.wait_registry import WaitRegistry

Translation = Callable[[Mapping[str, Any]], Mapping[str, Any]]  # of weights into other names


class OptimizedModel(Protocol):
    """The distributed model, as the script's optimizer knows it.

    Attributes:
        module: the script's module, or what took its place.
        names: id of a parameter -> its name in the module.
        parallel: the engine's model, once it is distributed.
    """

    module: nn.Module
    names: dict[int, str]
    parallel: ParallelModel | None

    def settle_gradients(self) -> None:
        """Sum the gradients that several ranks hold in part."""

    def gather(self) -> None:
        """Gather whole parameters after an optimizer step, where its state alone is sharded."""

    def release(self) -> None:
        """Let go of gathered parameters before their shards change."""

    def return_from_host(self) -> None:
        """Put the distributed weights back in their places."""


class BackwardPasses(Protocol):
    """The backward passes of a step, as the script's optimizer knows them."""

    def complete_gradients(self) -> None:
        """Reduce what passes have left on their ranks."""

    def drop_gradients(self) -> None:
        """Forget what passes have left on their ranks."""


class ModelOptimizer(Protocol):
    """The script's optimizer, as the distributed model knows it.

    Attributes:
        public: the optimizer or its wrapper, as the script holds it.
        reads_gradients: it may read gradients before its step.
    """

    public: Any
    reads_gradients: bool

    @property
    def locals(self) -> list[tuple[ParameterEntry, nn.Parameter]]:
        """Entries of this rank, with the tensors that the optimizer updates."""

    @property
    def names_by_tensor_rank(self) -> list[list[str]]:
        """Names of its parameters in their order, a list for each tensor rank."""

    @property
    def loss_scale(self) -> float:
        """The factor of losses before backward."""

    def adopt(self, parallel: ParallelModel) -> None:
        """Update this rank's elements in the place of whole parameters."""

    def be_ready(self) -> None:
        """Load the state that waits: all that holds it is there."""

    def settle(self) -> None:
        """Complete the gradients of this step."""

    def show_gradients(self) -> None:
        """Show the gradients on the tensors that the optimizer updates."""


class SmpSessionV1(SmpSession):
    """`smp.state`. Before `init` everything but `initialized` raises NotInitializedError.

    Attributes:
        model: the script's distributed model, once it is made.
        weights, passes: the parts of it that its optimizer works with.
        optimizer: the script's optimizer as the model sees it, once it is made.
        step_count: calls of step functions; dropout goes on by it.
        tracing: the model's structure is being read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.model: nn.Module | None = None
        self.weights: OptimizedModel | None = None
        self.passes: BackwardPasses | None = None
        self.optimizer: ModelOptimizer | None = None
        self.step_count = 0
        self.tracing = False
        self._translations: list[tuple[Translation, Translation]] = []
        self._cfg: ModelParallelConfig | None = None
        self._layout: Layout | None = None
        self._waits: WaitRegistry | None = None

    # ---- what scripts read

    @property
    def cfg(self) -> ModelParallelConfig:
        """SMP's options by name."""
        return self.after_init(self._cfg)

    @property
    def module_manager(self) -> SimpleNamespace:
        """For transformers' `save_pretrained`: (SMP's names to its own, and back) of a replaced model's weights."""
        return SimpleNamespace(translate_functions=self._translations)

    @property
    def patch_manager(self) -> SimpleNamespace:
        """For scripts that call modules past SMP, whose methods it replaces: every class has its own methods."""
        return SimpleNamespace(get_original_method=lambda name, owner: getattr(owner, name))

    @property
    def param_index_to_name_tp_group(self) -> dict[int, dict[int, str]]:
        """Tensor rank -> number of a parameter in the optimizer -> its name; once the model is distributed."""
        by_rank = [] if self.optimizer is None else self.optimizer.names_by_tensor_rank
        return {rank: dict(enumerate(names)) for rank, names in enumerate(by_rank)}

    @property
    def param_name_to_index_tp_group(self) -> dict[int, dict[str, int]]:
        """Tensor rank -> name of a parameter -> its number in the optimizer; once the model is distributed."""
        by_rank = self.param_index_to_name_tp_group
        return {rank: {name: number for number, name in names.items()} for rank, names in by_rank.items()}

    # ---- this rank among the others

    @property
    def layout(self) -> Layout:
        """The named axes of the ranks, and this rank's position on each."""
        return self.after_init(self._layout)

    @property
    def waits(self) -> WaitRegistry:
        """Who waits for whom in messages."""
        return self.after_init(self._waits)

    def init(self, config: Any = None) -> None:
        """Join the other ranks and take a place among them; `config` is SMP's dict of options.

        Raises:
            ConfigError: an option is unknown, wrong or refused, the ranks do not fit the degrees, or the script has
                joined them over NCCL alone.
        """
        if config is not None and not isinstance(config, dict):
            raise ConfigError(f"smp.init takes a dict of options, not {config!r}; pass a dict or nothing")
        self.reset()
        device = device_type()
        cfg = read_configuration(config, device)
        job = cfg.base_job()
        world = self.join(device, choose_backend(job.parallel, launched_world(device), cfg.notes))
        _check_host_memory()
        if note := joined_backend_note(job.parallel.ddp_dist_backend):
            cfg.notes.append(note)
        if reason := without_instructions(job.precision.compute, device):
            cfg.notes.append(f"smp_options: {reason}.")
        with cfg.own_words("smp.init: "):
            precheck(job, world)
        degrees, placement = axis_degrees(job, world.size), job.parallel.placement_strategy
        self._layout = Layout(degrees, placement, dist.get_rank(), world.local_size, device)
        # Now, while all ranks are here: a group is made by all, and later only some ask for it.
        for axes in (*map(smp_axes, SMP_LETTERS), one_copy_axes()):
            self._layout.group(*axes)
        self._waits = WaitRegistry(dist.get_rank())
        self._cfg, self.initialized = cfg, True
        print_notes(cfg.notes)

    def leave(self) -> None:
        """Let ranks that wait for this one know that it comes no more."""
        if self._waits is not None:
            self._waits.leave()

    def reset(self) -> None:
        """Forget everything and leave the other ranks."""
        self.leave()
        super().reset()

    # ---- the script's model and optimizer

    def attach_model(
        self, model: nn.Module, weights: OptimizedModel, passes: BackwardPasses, to_hf: Any, to_smp: Any
    ) -> None:
        """Make `model` the script's; `to_hf` and `to_smp` are (module, weights) -> weights under the other names."""
        self.model, self.weights, self.passes = model, weights, passes
        self._translations = [(partial(to_hf, weights.module), partial(to_smp, weights.module))]

    def attach_optimizer(self, optimizer: ModelOptimizer) -> None:
        """Make `optimizer` the script's, of the model that is there or comes later."""
        self.optimizer = optimizer
        if self.weights is not None and self.weights.parallel is not None:
            optimizer.adopt(self.weights.parallel)
            optimizer.be_ready()


def _check_host_memory() -> None:
    """Refuse a group over NCCL alone: messages, and what is agreed on, lie in host memory, which it does not carry."""
    if not carries_host_memory():
        raise ConfigError(
            "smp.init: the script has joined its ranks over NCCL, which carries no tensors in host memory, and SMP's "
            "messages lie there; call smp.init() before init_process_group, or give that 'cpu:gloo,cuda:nccl'"
        )


state = SmpSessionV1()
atexit.register(state.reset)
