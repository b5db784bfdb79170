"""Losses of routers in a script: over the tokens of all ranks in a forward, added to the gradients of its loss.

Both losses are Megatron's, as SMP's are (core/transformer/moe/moe_utils.py): each layer has its own, and their
gradients add up. The balancing loss is E · Σ f_e · p_e, where f_e is the share of expert e in the choices; of a token's
k choices `ExpertRouters` counts each whole, and it takes the mean of the layers.

The script divides and scales its loss as it likes: the gradient that reaches the loss in backward says by how much.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import ConfigError
from shardwise.job.axes import Axis, data_axes
from shardwise.model.facts import ModelFacts
from shardwise.parallel.layout import Layout
from shardwise.parallel.routers import ExpertRouters
from shardwise.parallel.transforms.routers import watch_router
from shardwise.smp.v2.moe.moe_config import WHERE, MoEConfig


def add_router_losses(
    model: nn.Module, facts: ModelFacts, config: MoEConfig, layout: Layout, device: torch.device
) -> None:
    """Add the losses that `config` asks for to the gradients of `model`, of which the logged loss is the same.

    Raises:
        ConfigError: the model has no routers that can be watched, or adds a balancing loss of its own.
    """
    if not (config.balancing or config.moe_z_loss_coeff):
        return
    if not facts.routers:
        raise ConfigError(
            f"{WHERE}: {facts.family} has no router that transformers records beside experts that take its weights; "
            "use moe_load_balancing='none' and moe_z_loss_coeff=0"
        )
    if config.balancing and getattr(model.config, "output_router_logits", False):
        raise ConfigError(
            f"{WHERE}.moe_load_balancing='aux_loss' and output_router_logits of the model's config would both add a "
            "balancing loss; leave one out"
        )
    layers = len(facts.routers)
    routers = ExpertRouters(
        tuple(facts.routers),
        facts.expert_stacks[next(iter(facts.routers))],
        config.balancing * layers / max(1, facts.experts_of_token),
        (config.moe_z_loss_coeff or 0.0) * layers,
        layout.index(Axis.TENSOR) == 0,
        device,
        torch.float32,
        by_layer=True,
    )
    for stack, (router, output) in facts.routers.items():
        watch_router(model, stack, router, output, routers)
    _StepOfForward(model, routers, layout.size(*data_axes())).watch()


class _StepOfForward:
    """A forward and its backward as the step of the routers; FSDP takes the mean over `ranks`."""

    def __init__(self, model: nn.Module, routers: ExpertRouters, ranks: int) -> None:
        self.model, self.routers, self.ranks = model, routers, ranks

    def watch(self) -> None:
        """Count the routes of every forward in training."""
        self.model.register_forward_pre_hook(self._begin)
        self.model.register_forward_hook(self._end)

    def _begin(self, model: nn.Module, args: Any) -> None:
        if model.training and torch.is_grad_enabled():
            self.routers.begin()

    def _end(self, model: nn.Module, args: Any, output: Any) -> None:
        if not (model.training and torch.is_grad_enabled()):
            return
        self.routers.settle()
        loss = getattr(output, "loss", None)
        if not isinstance(loss, Tensor):
            raise ConfigError(f"{WHERE}: losses of routers go with the model's own loss; give its forward labels")
        loss.register_hook(self._scale)

    def _scale(self, gradient: Tensor) -> None:
        self.routers.loss_scale = float(gradient) * self.ranks
