"""Mistakes that distributed training programs make, planted on purpose, to prove that `shardwise verify` names them.

Each fault is a context manager that patches our side; the oracle stays whole. The key in `FAULTS` is the name that the
diagnosis has to report.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.data import loader
from shardwise.job.axes import Axis
from shardwise.kernels.attention import interface
from shardwise.model.discover import find_ties
from shardwise.parallel.model import ParallelModel
from shardwise.parallel.tensor_map import TensorMap
from shardwise.parallel.transforms import sharding
from shardwise.testing import capture, oracle_data, oracle_rows, run_checks
from shardwise.training import init, setup, step
from shardwise.training.objectives.language_modelling import LanguageModelling
from shardwise.training.optimizer import ShardedOptimizer

RANK = 1  # the rank that goes wrong
MICROBATCH = 1  # the microbatch that goes wrong


@contextmanager
def _wrapped(owner: Any, name: str, wrapper: Callable[..., Any]) -> Iterator[None]:
    """`owner.name` becomes `wrapper(original, *args, **kwargs)`."""
    original = getattr(owner, name)

    def run(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    with mock.patch.object(owner, name, run):
        yield


def _gradient_times(factor: float, here: Callable[[int], bool]) -> AbstractContextManager[None]:
    """Multiply the gradients of the microbatches for which `here(number)` holds; the reported loss stays."""
    number = 0

    def wrapper(original: Callable[..., Any], self: Any, microbatch: Any, output: Any) -> Any:
        nonlocal number
        loss, count = original(self, microbatch, output)
        chosen = here(number % self.model.plan.accumulation)
        number += 1
        return (loss.detach() + factor * (loss - loss.detach()) if chosen else loss), count

    return _wrapped(LanguageModelling, "loss", wrapper)


def _mean_for_sum() -> AbstractContextManager[None]:
    def wrapper(original: Callable[..., Any], model: Any, groups: Any, plan: Any, *args: Any) -> Any:
        modules = original(model, groups, plan, *args)
        for module in modules:
            module.set_gradient_divide_factor(float(plan.data_ranks))
        return modules

    return _wrapped(sharding, "shard_model", wrapper)


def _missing_replica_reduction() -> AbstractContextManager[None]:
    def wrapper(original: Callable[..., Any], self: ParallelModel, *args: Any, **kwargs: Any) -> Any:
        group, real = self.layout.group(Axis.REPLICA), dist.all_reduce

        def all_reduce(tensor: Tensor, *rest: Any, **options: Any) -> Any:
            return None if options.get("group") is group else real(tensor, *rest, **options)

        with mock.patch.object(dist, "all_reduce", all_reduce):
            return original(self, *args, **kwargs)

    return _wrapped(ParallelModel, "run", wrapper)


def _wrong_norm() -> AbstractContextManager[None]:
    def wrapper(original: Callable[..., Any], *args: Any) -> Any:
        return TensorMap([dataclasses.replace(entry, replication=1) for entry in original(*args)])

    return _wrapped(TensorMap, "of", wrapper)


def _broken_tie() -> AbstractContextManager[None]:
    def wrapper(original: Callable[..., Any], job: Any) -> nn.Module:
        model: nn.Module = original(job)
        for _, *others in find_ties(model):
            for name in others:
                owner, _, leaf = name.rpartition(".")
                fresh = nn.Parameter(torch.empty_like(model.get_parameter(name)))
                model.get_submodule(owner).register_parameter(leaf, fresh)
        return model

    return _wrapped(setup, "build_model", wrapper)


def _shifted_label() -> AbstractContextManager[None]:
    def wrapper(original: Callable[..., Any], self: Any, microbatch: Any, output: Any) -> Any:
        late = dataclasses.replace(microbatch, labels=microbatch.labels.roll(1, dims=1))
        return original(self, late, output)

    return _wrapped(LanguageModelling, "loss", wrapper)


def _leaked_document() -> AbstractContextManager[None]:
    return _wrapped(interface, "same_document", lambda original, ids, *rest: original(torch.zeros_like(ids), *rest))


def _stale_dropout() -> AbstractContextManager[None]:
    return _wrapped(
        ParallelModel, "scope", lambda original, self, microbatch, step, *rest: original(self, microbatch, 0, *rest)
    )


def _stale_shard() -> AbstractContextManager[None]:
    return _wrapped(
        ShardedOptimizer, "step", lambda original, self: None if dist.get_rank() == RANK else original(self)
    )


def _clip_skipped() -> AbstractContextManager[None]:
    return _wrapped(
        step, "_rescale", lambda original, optimizer, norm, scale, clip: original(optimizer, norm, scale, None)
    )


def _clip_twice() -> AbstractContextManager[None]:
    def wrapper(original: Callable[..., Any], optimizer: Any, norm: Tensor, scale: float, clip: float) -> None:
        original(optimizer, norm, scale, clip)
        original(optimizer, norm, 1.0, clip)

    return _wrapped(step, "_rescale", wrapper)


def _decay_on_bias() -> AbstractContextManager[None]:
    def wrapper(original: Callable[..., Any], self: Any, tensor_map: Any, settings: Any) -> None:
        original(self, tensor_map, settings)
        for group in self.inner.param_groups:
            group["weight_decay"] = settings.weight_decay

    return _wrapped(ShardedOptimizer, "__init__", wrapper)


def _wrong_learning_rate() -> AbstractContextManager[None]:
    return _wrapped(ShardedOptimizer, "set_learning_rate", lambda original, self, rate: original(self, 2 * rate))


def _wrong_loss() -> AbstractContextManager[None]:
    def wrapper(original: Callable[..., Any], model: Any, optimizer: Any, totals: Tensor, scale: float) -> Any:
        return totals[0], *original(model, optimizer, totals, scale)[1:]  # this rank's share only

    return _wrapped(step, "reduce_loss_and_norm", wrapper)


def _lost_tied_gradient() -> AbstractContextManager[None]:
    def wrapper(original: Callable[..., Any], self: ParallelModel) -> None:
        own = [] if dist.get_rank() != RANK else self.tensor_map.gradients(list(self.tied))
        before = [gradient.clone() for gradient in own]
        original(self)
        for gradient, part in zip(own, before, strict=True):
            gradient.copy_(part)

    return _wrapped(ParallelModel, "sum_shared_gradients", wrapper)


def _drifting_copy() -> AbstractContextManager[None]:
    def wrapper(original: Callable[..., Any], self: ShardedOptimizer) -> None:
        original(self)
        if dist.get_rank() == RANK:
            norm = next(local for entry, local in self.locals if entry.split is None and len(entry.shape) == 1)
            norm.data.mul_(1 + 1e-9)

    return _wrapped(ShardedOptimizer, "step", wrapper)


def _wrong_eps() -> AbstractContextManager[None]:
    def wrapper(original: Callable[..., Any], self: ShardedOptimizer, *args: Any) -> None:
        original(self, *args)
        for group in self.inner.param_groups:
            group["eps"] = 1e-6

    return _wrapped(ShardedOptimizer, "__init__", wrapper)


def _late_correction() -> AbstractContextManager[None]:
    def wrapper(original: Callable[..., Any], self: ShardedOptimizer, *args: Any) -> None:
        original(self, *args)
        for _, local in self.locals:
            moments = {moment: torch.zeros_like(local) for moment in ("exp_avg", "exp_avg_sq")}
            self.inner.state[local] = {"step": torch.ones(()), **moments}

    return _wrapped(ShardedOptimizer, "__init__", wrapper)


def _no_decay() -> AbstractContextManager[None]:
    def wrapper(original: Callable[..., Any], self: ShardedOptimizer, *args: Any) -> None:
        original(self, *args)
        embedding = next(local for entry, local in self.locals if len(entry.shape) > 1)
        for group in self.inner.param_groups:
            group["params"] = [local for local in group["params"] if local is not embedding]
        self.inner.add_param_group({"params": [embedding], "weight_decay": 0.0})

    return _wrapped(ShardedOptimizer, "__init__", wrapper)


def _rounded_moments() -> AbstractContextManager[None]:
    def wrapper(original: Callable[..., Any], self: ShardedOptimizer) -> None:
        original(self)
        for state in self.inner.state.values():
            state["exp_avg"].copy_(state["exp_avg"].bfloat16())

    return _wrapped(ShardedOptimizer, "step", wrapper)


def _no_update() -> AbstractContextManager[None]:
    return _wrapped(ShardedOptimizer, "step", lambda original, self: None)


def _turned_gradient() -> AbstractContextManager[None]:
    def wrapper(original: Callable[..., Any], self: ParallelModel, *args: Any, **kwargs: Any) -> Tensor:
        totals: Tensor = original(self, *args, **kwargs)
        if dist.get_rank() == RANK:
            for entry in list(self.tensor_map)[:-1]:
                gradient = entry.local_gradient
                if gradient is not None:
                    gradient.copy_(gradient.flip(0).sin())
        return totals

    return _wrapped(ParallelModel, "run", wrapper)


@contextmanager
def _everywhere(name: str, wrapper: Callable[..., Any], *modules: Any) -> Iterator[None]:
    """`_wrapped` for a function that several modules have imported by name."""
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(_wrapped(module, name, wrapper))
        yield


def _wrong_schedule() -> AbstractContextManager[None]:
    def wrapper(original: Callable[..., float], settings: Any, step: int, steps: int, warmup: int) -> float:
        return original(settings, step, max(steps // 2, step + 1), warmup)

    return _everywhere("learning_rate", wrapper, capture, run_checks)


def _repeated_sample() -> AbstractContextManager[None]:
    def wrapper(original: Callable[..., int], seed: int, counter: int, size: int) -> int:
        return original(seed, counter, size) // 2

    return _everywhere("order", wrapper, loader, oracle_data, oracle_rows, run_checks)


def _unequal_start() -> AbstractContextManager[None]:
    def wrapper(original: Callable[..., Any], seed: int, name: str, device: torch.device) -> Any:
        return original(seed + (dist.get_rank() if name.endswith("wte") else 0), name, device)

    return _wrapped(init, "seeded", wrapper)


def _mode_always(mode: bool) -> AbstractContextManager[None]:
    return _wrapped(ParallelModel, "train", lambda original, self, wanted=True: original(self, mode))


FAULTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "lost_rank": lambda: _gradient_times(0.0, lambda number: dist.get_rank() == RANK),
    "lost_microbatch": lambda: _gradient_times(0.0, lambda number: number == MICROBATCH),
    "doubled_rank": lambda: _gradient_times(2.0, lambda number: dist.get_rank() == RANK),
    "doubled_microbatch": lambda: _gradient_times(2.0, lambda number: number == MICROBATCH),
    "mean_for_sum": _mean_for_sum,
    "missing_replica_reduction": _missing_replica_reduction,
    "broken_tie": _broken_tie,
    "shifted_label": _shifted_label,
    "leaked_document": _leaked_document,
    "stale_dropout": _stale_dropout,
    "wrong_loss": _wrong_loss,
    "wrong_norm": _wrong_norm,
    "stale_shard": _stale_shard,
    "clip_skipped": _clip_skipped,
    "clip_twice": _clip_twice,
    "decay_on_bias": _decay_on_bias,
    "wrong_learning_rate": _wrong_learning_rate,
    "gradient_copies_apart": _lost_tied_gradient,  # of a stage that is not the first
    "replicas_apart": _drifting_copy,  # of a tensor rank that is not the first
    "wrong_eps": _wrong_eps,
    "late_correction": _late_correction,
    "no_decay": _no_decay,  # of embeddings
    "no_update": _no_update,
    "wrong_update": _rounded_moments,  # no known mistake: the tensors are named
    "wrong_schedule": _wrong_schedule,
    "repeated_sample": _repeated_sample,
    "unequal_start": _unequal_start,
    "trained_evaluation": lambda: _mode_always(True),
    "left_in_evaluation": lambda: _mode_always(False),
    "unknown_gradient": _turned_gradient,  # no known mistake: the module is named
}
