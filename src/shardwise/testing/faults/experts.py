"""Faults of experts that ranks share and of their routers: what went wrong in the field, planted here.

Scaled gradients of experts: pytorch 160285, DeepSpeed 5259, Megatron-LM 5656. Norms without experts: Megatron-LM 5916.
Balancing losses that are lost or scaled: Automodel 1408, 1412 and 3359, Megatron-LM 5047. Biases that do not move, or
by the counts of one rank: torchtitan 1114. Rows that nobody has written: Megatron-LM 1764.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.job.axes import Axis
from shardwise.parallel import routers
from shardwise.parallel.experts import SharedExperts
from shardwise.parallel.model import ParallelModel
from shardwise.parallel.routers import ExpertRouters
from shardwise.parallel.tensor_map import ParameterEntry
from shardwise.plan.plan import Plan
from shardwise.testing.faults.patching import RANK, Fault, wrapped
from shardwise.training import step


def _is_expert(entry: ParameterEntry) -> bool:
    return entry.split is not None and entry.split.axis == Axis.EXPERT


def _expert_gradients_times(factor: Callable[[Plan], float]) -> Fault:
    """Multiply the gradients of experts that ranks share."""

    def wrapper(original: Callable[..., Any], self: ParallelModel, *args: Any, **kwargs: Any) -> Tensor:
        totals: Tensor = original(self, *args, **kwargs)
        for entry in filter(_is_expert, self.tensor_map):
            if entry.local_gradient is not None:
                entry.local_gradient.mul_(factor(self.plan))
        return totals

    return lambda: wrapped(ParallelModel, "run", wrapper)


def _experts_in_norm(times: int) -> Fault:
    """Let the gradient norm count the experts that ranks share so often."""

    def wrapper(original: Callable[..., Tensor], gradients: Any, device: torch.device) -> Tensor:
        listed = list(gradients)
        experts = [(entry, gradient) for entry, gradient in listed if _is_expert(entry)]
        others = [(entry, gradient) for entry, gradient in listed if not _is_expert(entry)]
        return original(others + times * experts, device)

    return lambda: wrapped(step, "squared_share", wrapper)


def _balancing_times(factor: Callable[[Plan], float]) -> Fault:
    """Multiply the gradient of the routers' losses."""

    def wrapper(original: Callable[..., None], self: ParallelModel, loss_scale: float) -> None:
        original(self, loss_scale * factor(self.plan))

    return lambda: wrapped(ParallelModel, "scale_router_losses", wrapper)


def _own_routes() -> AbstractContextManager[None]:
    """Let each rank go by its own tokens."""
    alone: Any = SimpleNamespace(all_reduce=lambda tensor: None)
    return mock.patch.object(routers, "dist", alone)


def _routes_of_every_tensor_rank() -> AbstractContextManager[None]:
    def wrapper(original: Callable[..., None], self: ExpertRouters) -> None:
        with mock.patch.object(self, "counts_once", True):
            original(self)

    return wrapped(ExpertRouters, "settle", wrapper)


def _fixed_bias() -> AbstractContextManager[None]:
    return wrapped(ParallelModel, "update_router_biases", lambda original, self: None)


def _bias_moved_twice() -> AbstractContextManager[None]:
    def wrapper(original: Callable[..., None], self: ParallelModel) -> None:
        original(self)
        original(self)

    return wrapped(ParallelModel, "update_router_biases", wrapper)


def _unwritten_rows() -> AbstractContextManager[None]:
    """Let a row of a rank's experts hold what was in memory before."""

    def wrapper(original: Callable[..., Tensor], self: SharedExperts, rows: Tensor, counts: Tensor) -> Tensor:
        outputs = original(self, rows, counts)
        if dist.get_rank() != RANK or not len(outputs):
            return outputs
        return torch.cat([outputs[:1] * float("nan"), outputs[1:]])

    return wrapped(SharedExperts, "_compute_sorted", wrapper)


def _dropped_token() -> AbstractContextManager[None]:
    """Let a rank's experts leave out one of the rows that they are sent."""

    def wrapper(original: Callable[..., Tensor], self: SharedExperts, rows: Tensor, counts: Tensor) -> Tensor:
        outputs = original(self, rows, counts)
        return torch.cat([0 * outputs[:1], outputs[1:]]) if dist.get_rank() == RANK else outputs

    return wrapped(SharedExperts, "_compute_sorted", wrapper)


def _fixed_routes() -> AbstractContextManager[None]:
    """Let the router's weights have no gradient from what the experts make."""

    def wrapper(
        original: Callable[..., Tensor], self: SharedExperts, states: Tensor, experts: Tensor, weights: Tensor
    ) -> Tensor:
        return original(self, states, experts, weights.detach())

    return wrapped(SharedExperts, "run", wrapper)


EXPERT_FAULTS: dict[str, Fault] = {
    "expert_gradients_by_degree": _expert_gradients_times(lambda plan: plan.degrees[Axis.EXPERT]),
    "expert_gradients_averaged": _expert_gradients_times(lambda plan: 1 / plan.degrees[Axis.EXPERT]),
    "experts_left_out_of_norm": _experts_in_norm(0),
    "experts_twice_in_norm": _experts_in_norm(2),
    "missing_balancing_loss": _balancing_times(lambda plan: 0.0),
    "balancing_loss_by_microbatch": _balancing_times(lambda plan: plan.accumulation),
    "balancing_loss_averaged": _balancing_times(lambda plan: 1 / plan.data_ranks),
    "own_routes": _own_routes,
    "routes_of_every_tensor_rank": _routes_of_every_tensor_rank,
    "fixed_router_bias": _fixed_bias,
    "router_bias_moved_twice": _bias_moved_twice,
    "dropped_token": _dropped_token,
    "fixed_routes": _fixed_routes,
    "unwritten_rows": _unwritten_rows,
}
