"""Weights drawn where they live: `DelayedParamIniter` for models built on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardwise.model.experts import holds_experts
from shardwise.model.initializers import run_initializer
from shardwise.smp.v2.expert_ranks import SEED
from shardwise.smp.v2.session import state
from shardwise.smp.v2.split_model import local_names
from shardwise.training.init import seeded


class DelayedParamIniter:
    """Gives FSDP what draws the parameters of a model on the meta device, equal on every layout.

    Args:
        model: before FSDP wraps it.
        init_method_using_config: draws a module's parameters, in the place of the model's own `_init_weights` or
            `reset_parameters`; it gets the module with whole tensors.
        verbose: name each module that is drawn, on rank 0.
    """

    def __init__(
        self,
        model: nn.Module,
        init_method_using_config: Callable[[nn.Module], Any] | None = None,
        verbose: bool = False,
    ) -> None:
        self.model, self.own, self.verbose = model, init_method_using_config, verbose
        self.names = {id(module): name for name, module in model.named_modules()}
        places: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for leaf, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                places.setdefault(id(parameter), []).append((module, leaf))
        self.ties = [places for places in places.values() if len(places) > 1]

    def get_param_init_fn(self) -> Callable[[nn.Module], None]:
        """Return FSDP's `param_init_fn`: it draws a module's own parameters and buffers, not its children's."""
        return self._draw

    def get_post_param_init_fn(self) -> Callable[[nn.Module], None]:
        """Return FSDP's `post_param_init_fn`: it ties again what was tied on the meta device."""
        return self._tie

    def count_num_params(self, module: nn.Module, *args: Any) -> int:
        """Count the elements of the module's parameters, ties once."""
        return sum(parameter.numel() for parameter in module.parameters())

    @contextmanager
    def validate_params_and_buffers_inited(self, enabled: bool = True) -> Iterator[None]:
        """Raise AssertionError at its end for parameters and buffers that still have no values."""
        yield
        if not enabled:
            return
        values = [*self.model.named_parameters(), *self.model.named_buffers()]
        left = [name for name, value in values if value.is_meta or (value.numel() and bool(value.isnan().any()))]
        assert not left, f"without values: {', '.join(left)}; give FSDP get_param_init_fn() as param_init_fn"

    @torch.no_grad()
    def _draw(self, module: nn.Module) -> None:
        name, cuts = self.names.get(id(module), ""), local_names(self.model)
        if self.verbose and state.rank == 0:
            print(f"drawing {name or type(module).__name__}")
        own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        for leaf, parameter in own.items():
            cut = cuts.get(f"{name}.{leaf}")
            shape = parameter.shape if cut is None else cut.shape
            whole = torch.full(shape, float("nan"), dtype=parameter.dtype, device=state.device)
            module.register_parameter(leaf, nn.Parameter(whole, requires_grad=parameter.requires_grad))
        for leaf, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            if buffer.is_meta:
                setattr(module, leaf, torch.empty_like(buffer, device=state.device))
        seed = vars(self.model).get(SEED, state.random_seed) if holds_experts(module) else state.random_seed
        with seeded(int(seed), name, state.device):
            if self.own is not None:
                self.own(module)
            else:
                run_initializer(self.model, name)
        for leaf in [leaf for leaf in own if f"{name}.{leaf}" in cuts]:
            part = cuts[f"{name}.{leaf}"].local_part(module.get_parameter(leaf))
            module.register_parameter(leaf, nn.Parameter(part, requires_grad=own[leaf].requires_grad))

    def _tie(self, module: nn.Module) -> None:
        for (first, leaf), *others in self.ties:
            for other, its in others:
                parameter = getattr(first, leaf)
                if parameter is not None:
                    other.register_parameter(its, parameter)
