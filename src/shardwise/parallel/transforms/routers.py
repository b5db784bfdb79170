"""Routers of experts watched at two places: their logits as they make them, and the call of the experts behind them."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from shardwise.job.axes import Axis
from shardwise.kernels.experts import ExpertForward
from shardwise.kernels.precision import torch_dtype
from shardwise.model.facts import ModelFacts
from shardwise.parallel.builder import BuildInputs, ModelBuilder, Transform
from shardwise.parallel.local_balancing import LocalBalancing
from shardwise.parallel.routers import ExpertRouters
from shardwise.plan.plan import Plan


class WatchedRouters(Transform):
    """One `ExpertRouters` for all stages of a rank, which counts routes and adds the routers' losses."""

    name = "routers"

    def applies(self, plan: Plan, facts: ModelFacts) -> bool:
        return bool(facts.routers)

    def apply(self, build: ModelBuilder, inputs: BuildInputs) -> None:
        plan, layout, facts = inputs.plan, inputs.layout, inputs.facts
        number, dtype = facts.expert_stacks[next(iter(facts.routers))], torch_dtype(plan.dtypes.loss)
        coefficient, asked = plan.balancing_coefficient, plan.job.router.balancing_loss
        with inputs.allocation():  # sums are on the device
            local = None
            if asked in ("model", "sequence"):
                layers = len(facts.routers)
                local = LocalBalancing(asked == "sequence", coefficient, number, layers, inputs.device, dtype)
            build.routers = ExpertRouters(
                tuple(facts.routers),
                number,
                0.0 if local else coefficient,
                plan.job.router.z_loss,
                layout.index(Axis.TENSOR) == 0 or plan.sequence_parallel,
                inputs.device,
                dtype,
                local,
                by_layer=asked == "layer",
            )
        for stage in build.stages:
            for stack, (router, output) in facts.routers.items():
                watch_router(stage.model, stack, router, output, build.routers)


def watch_router(model: nn.Module, stack: str, router: str, output: int, routers: ExpertRouters) -> None:
    """Keep the logits of one router, its output number `output`, until the experts of `stack` are called."""
    logits: list[Tensor] = []

    def keep(module: nn.Module, args: Any, outputs: Any) -> None:
        logits[:] = [outputs[output] if isinstance(outputs, tuple) else outputs]

    experts: Any = model.get_submodule(stack)
    model.get_submodule(router).register_forward_hook(keep)
    experts.forward = partial(_run, experts.forward, stack, logits, routers)


def _run(
    forward: ExpertForward, stack: str, logits: list[Tensor], routers: ExpertRouters, *args: Tensor, **kwargs: Tensor
) -> Tensor:
    """Call experts with weights that lead backward to the router's losses."""
    hidden_states, experts, weights = (*args, *kwargs.values())  # in the order of the experts' own arguments
    return forward(hidden_states, experts, routers.route(stack, logits.pop(), experts, weights))
