"""Faults between a gradient and the next weights: norm, clipping, decay, moments, schedule, copies."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.parallel.averaged_weights import AveragedWeights
from shardwise.parallel.tensor_map import ParameterEntry, TensorMap
from shardwise.testing.faults.patching import RANK, Fault, wrapped
from shardwise.training import session, step
from shardwise.training.optimizer import ShardedOptimizer
from shardwise.training.optimizers.matrix_exchange import MatrixExchange
from shardwise.training.session import Session


def _wrong_norm() -> AbstractContextManager[None]:
    def wrapper(original: Callable[..., Any], *args: Any) -> Any:
        return TensorMap([dataclasses.replace(entry, replication=1) for entry in original(*args)])

    return wrapped(TensorMap, "of", wrapper)


def _squares_with(change: Callable[[list[tuple[ParameterEntry, Tensor]]], Any]) -> Fault:
    """Change what the gradient norm is taken of."""

    def wrapper(original: Callable[..., Tensor], gradients: Iterable[Any], device: torch.device) -> Tensor:
        return original(change(list(gradients)), device)

    return lambda: wrapped(step, "squared_share", wrapper)


def _ties_twice(gradients: list[tuple[ParameterEntry, Tensor]]) -> list[tuple[ParameterEntry, Tensor]]:
    return gradients + [(entry, gradient) for entry, gradient in gradients if entry.aliases]


def _whole_by_rank(gradients: list[tuple[ParameterEntry, Tensor]]) -> list[tuple[ParameterEntry, Tensor]]:
    return [
        (dataclasses.replace(entry, replication=1) if entry.split is None else entry, gradient)
        for entry, gradient in gradients
    ]


def _norm_without_a_rank() -> AbstractContextManager[None]:
    def wrapper(original: Callable[..., Tensor], gradients: Any, device: torch.device) -> Tensor:
        return original(gradients, device) * (dist.get_rank() != RANK)

    return wrapped(step, "squared_share", wrapper)


def _rounded_norm() -> AbstractContextManager[None]:
    def wrapper(original: Callable[..., Tensor], *args: Any) -> Tensor:
        share = original(*args)
        return share.bfloat16().to(share.dtype)

    return wrapped(step, "squared_share", wrapper)


def _rescaled_with(norm_of: Callable[[Any, float, float], float]) -> Fault:
    """Let gradients be clipped by another norm: `norm_of(optimizer, norm, scale)`."""

    def wrapper(original: Callable[..., Any], optimizer: Any, norm: float, scale: float, clip: float | None) -> None:
        original(optimizer, norm_of(optimizer, norm, scale), scale, clip)

    return lambda: wrapped(step, "_rescale", wrapper)


def _own_norm(optimizer: ShardedOptimizer, norm: float, scale: float) -> float:
    squares = [gradient.double().square().sum() for _, gradient in optimizer.gradients()]
    return float(torch.stack(squares).sum().sqrt()) / scale


def _clip_skipped() -> AbstractContextManager[None]:
    return wrapped(
        step, "_rescale", lambda original, optimizer, norm, scale, clip: original(optimizer, norm, scale, None)
    )


def _clip_twice() -> AbstractContextManager[None]:
    def wrapper(original: Callable[..., Any], optimizer: Any, norm: float, scale: float, clip: float) -> None:
        original(optimizer, norm, scale, clip)
        original(optimizer, norm, 1.0, clip)

    return wrapped(step, "_rescale", wrapper)


def _made_with(change: Callable[[ShardedOptimizer, Any], None]) -> Fault:
    """Change the optimizer once it is made."""

    def wrapper(
        original: Callable[..., Any], self: ShardedOptimizer, tensor_map: Any, settings: Any, *groups: Any
    ) -> None:
        original(self, tensor_map, settings, *groups)
        change(self, settings)

    return lambda: wrapped(ShardedOptimizer, "__init__", wrapper)


def _decay_on_bias(optimizer: ShardedOptimizer, settings: Any) -> None:
    for group in optimizer.inner.param_groups:
        group["weight_decay"] = settings.weight_decay


def _wrong_eps(optimizer: ShardedOptimizer, settings: Any) -> None:
    for group in optimizer.inner.param_groups:
        group["eps"] = 1e-6


def _late_correction(optimizer: ShardedOptimizer, settings: Any) -> None:
    for _, local in optimizer.locals:
        moments = {moment: torch.zeros_like(local) for moment in ("exp_avg", "exp_avg_sq")}
        optimizer.inner.state[local] = {"step": torch.ones(()), **moments}


def _no_decay(optimizer: ShardedOptimizer, settings: Any) -> None:
    embedding = next(local for entry, local in optimizer.locals if len(entry.shape) > 1)
    for group in optimizer.inner.param_groups:
        group["params"] = [local for local in group["params"] if local is not embedding]
    optimizer.inner.add_param_group({"params": [embedding], "weight_decay": 0.0})


def _options_with(change: Callable[[dict[str, Any]], None]) -> Fault:
    """Change each of the optimizer's groups."""

    def of_groups(optimizer: ShardedOptimizer, settings: Any) -> None:
        for group in optimizer.inner.param_groups:
            change(group)

    return _made_with(of_groups)


def _doubled_decay(group: dict[str, Any]) -> None:
    group["weight_decay"] *= 2


def _uncorrected_moments(optimizer: ShardedOptimizer, settings: Any) -> None:
    _late_correction(optimizer, settings)
    for state in optimizer.inner.state.values():
        state["step"].fill_(1e9)


def _before_update(change: Callable[[ShardedOptimizer], None]) -> Fault:
    """Change the optimizer, or the gradients that it has been given, as it begins to update."""

    def wrapper(original: Callable[..., Any], self: ShardedOptimizer) -> None:
        change(self)
        original(self)

    return lambda: wrapped(ShardedOptimizer, "step", wrapper)


def _decay_in_gradient(optimizer: ShardedOptimizer) -> None:
    """Add weight decay to gradients, where it should shrink the weights beside them."""
    for group in optimizer.inner.param_groups:
        decay = group["weight_decay"] or group.get("added_decay", 0.0)
        group |= {"weight_decay": 0.0, "added_decay": decay}
        own = {id(parameter) for parameter in group["params"]}
        for entry, local in optimizer.locals:
            if id(local) in own and entry.local_gradient is not None:
                entry.local_gradient.add_(decay * local.detach())


def _lost_state(optimizer: ShardedOptimizer) -> None:
    optimizer.inner.state.clear()


def _frozen_tensor(optimizer: ShardedOptimizer) -> None:
    """Let one tensor go without its update."""
    entry = next(entry for entry, _ in optimizer.locals if len(entry.shape) > 1)
    entry.parameter.grad = None


def _clip_by_tensor() -> AbstractContextManager[None]:
    def wrapper(original: Callable[..., Any], optimizer: Any, norm: float, scale: float, clip: float) -> None:
        for _, gradient in optimizer.gradients():
            gradient.mul_(min(1.0, clip / (float(gradient.norm()) + 1e-6)))

    return wrapped(step, "_rescale", wrapper)


def _clip_by_value() -> AbstractContextManager[None]:
    def wrapper(original: Callable[..., Any], optimizer: Any, norm: float, scale: float, clip: float) -> None:
        for _, gradient in optimizer.gradients():
            gradient.clamp_(-1e-2 * clip, 1e-2 * clip)

    return wrapped(step, "_rescale", wrapper)


def _scale_left_in() -> AbstractContextManager[None]:
    def wrapper(original: Callable[..., Any], optimizer: Any, norm: float, scale: float, clip: float | None) -> None:
        original(optimizer, norm, 1.0, clip)

    return wrapped(step, "_rescale", wrapper)


def _after_update(change: Callable[[ShardedOptimizer], None]) -> Fault:
    def wrapper(original: Callable[..., Any], self: ShardedOptimizer) -> None:
        original(self)
        change(self)

    return lambda: wrapped(ShardedOptimizer, "step", wrapper)


def _drifting_copy(optimizer: ShardedOptimizer) -> None:
    if dist.get_rank() == RANK:
        norm = next(local for entry, local in optimizer.locals if entry.split is None and len(entry.shape) == 1)
        norm.data.mul_(1 + 1e-9)


def _swollen_moments(optimizer: ShardedOptimizer) -> None:
    for state in optimizer.inner.state.values():
        state["exp_avg"].mul_(1.01)


def _stale_shard() -> AbstractContextManager[None]:
    return wrapped(ShardedOptimizer, "step", lambda original, self: None if dist.get_rank() == RANK else original(self))


def _updated_twice() -> AbstractContextManager[None]:
    def wrapper(original: Callable[..., Any], self: ShardedOptimizer) -> None:
        original(self)
        original(self)

    return wrapped(ShardedOptimizer, "step", wrapper)


def _no_update() -> AbstractContextManager[None]:
    return wrapped(ShardedOptimizer, "step", lambda original, self: None)


def _wrong_learning_rate() -> AbstractContextManager[None]:
    return wrapped(ShardedOptimizer, "set_learning_rate", lambda original, self, rate: original(self, 2 * rate))


def _scheduled_by(change: Callable[[int, int, int], tuple[int, int]]) -> Fault:
    """Let the schedule be asked for another (step, steps), which `change(step, steps, warmup)` returns."""

    def wrapper(original: Callable[..., float], settings: Any, step: int, steps: int, warmup: int) -> float:
        return original(settings, *change(step, steps, warmup), warmup)

    return lambda: wrapped(session, "learning_rate", wrapper)


def _rate_of_the_step_before() -> AbstractContextManager[None]:
    def wrapper(original: Callable[..., float], self: Session) -> float:
        progress = self.progress
        self.progress = progress.model_copy(update={"step": max(progress.step - 1, 0)})
        rate = original(self)
        self.progress = progress
        return rate

    return wrapped(Session, "scheduled_rate", wrapper)


def _stale_average() -> AbstractContextManager[None]:
    """Let one rank average no step but its first."""

    def wrapper(original: Callable[..., Any], self: AveragedWeights) -> None:
        if dist.get_rank() != RANK or not self.values:
            original(self)

    return wrapped(AveragedWeights, "update", wrapper)


def _muon_of_slices() -> AbstractContextManager[None]:
    """Orthogonalize what a rank holds of a matrix, in the place of the matrix."""

    def wrapper(
        original: Callable[..., Any], self: MatrixExchange, slices: Any, work: Callable[[Tensor], Tensor]
    ) -> Any:
        for task, place, result in original(self, slices, lambda whole: whole):
            yield task, place, work(result.contiguous())

    return wrapped(MatrixExchange, "run", wrapper)


UPDATE_FAULTS: dict[str, Fault] = {
    "wrong_norm": _wrong_norm,
    "tie_twice_in_norm": _squares_with(_ties_twice),
    "whole_tensors_by_rank_in_norm": _squares_with(_whole_by_rank),
    "rank_left_out_of_norm": _norm_without_a_rank,
    "rounded_norm": _rounded_norm,
    "clip_skipped": _clip_skipped,
    "clip_twice": _clip_twice,
    "clip_scaled": _rescaled_with(lambda optimizer, norm, scale: norm * scale),
    "local_clip": _rescaled_with(_own_norm),
    "decay_on_bias": _made_with(_decay_on_bias),
    "no_decay": _made_with(_no_decay),  # of embeddings
    "wrong_eps": _made_with(_wrong_eps),
    "other_betas": _options_with(lambda group: group.update(betas=(0.9, 0.95 if group["betas"][1] != 0.95 else 0.99))),
    "doubled_decay": _options_with(_doubled_decay),
    "coupled_decay": _options_with(lambda group: group.update(decoupled_weight_decay=False)),
    "decay_in_gradient": _before_update(_decay_in_gradient),
    "lost_state": _before_update(_lost_state),
    "frozen_tensor": _before_update(_frozen_tensor),
    "clip_by_tensor": _clip_by_tensor,
    "clip_by_value": _clip_by_value,
    "scale_left_in": _scale_left_in,
    "no_bias_correction": _made_with(_uncorrected_moments),
    "late_correction": _made_with(_late_correction),
    "wrong_learning_rate": _wrong_learning_rate,
    "stale_shard": _stale_shard,
    "updated_twice": _updated_twice,
    "no_update": _no_update,
    "wrong_update": _after_update(_swollen_moments),  # no known mistake: the tensors are named
    "replicas_apart": _after_update(_drifting_copy),  # of a tensor rank that is not the first
    "wrong_schedule": _scheduled_by(lambda step, steps, warmup: (step, max(steps // 2, step + 1))),
    "fixed_rate": _scheduled_by(lambda step, steps, warmup: (warmup, steps)),
    "late_warmup": _scheduled_by(lambda step, steps, warmup: (step - 1 if step < warmup else step, steps)),
    "late_rate": _rate_of_the_step_before,
    "stale_average": _stale_average,
    "muon_of_slices": _muon_of_slices,
}
