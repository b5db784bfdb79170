"""Faults of gradients and losses: lost, doubled, divided, not reduced, or reduced at the wrong time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.job.axes import Axis
from shardwise.parallel import model as parallel_model
from shardwise.parallel.model import ParallelModel
from shardwise.parallel.tensor_map import ParameterEntry
from shardwise.parallel.transforms import sharding
from shardwise.testing.faults.patching import MICROBATCH, RANK, Fault, chosen, hooked, is_norm, together, wrapped
from shardwise.training import step
from shardwise.training.objectives.language_modelling import LanguageModelling
from shardwise.training.optimizer import ShardedOptimizer


def _weighted_microbatches(weight: Callable[[Any, int], float], reported: bool = False) -> AbstractContextManager[None]:
    """Multiply the gradient of each microbatch by `weight(model, number)`, and its reported loss too where asked."""
    number = 0

    def wrapper(original: Callable[..., Any], self: Any, microbatch: Any, output: Any) -> Any:
        nonlocal number
        loss, count = original(self, microbatch, output)
        factor = weight(self.model, number % self.model.plan.accumulation)
        number += 1
        shown = loss.detach() * (factor if reported else 1.0)
        return shown + factor * (loss - loss.detach()), count

    return wrapped(LanguageModelling, "loss", wrapper)


def _times(factor: float, applies: Callable[[int], bool]) -> Fault:
    return lambda: _weighted_microbatches(lambda model, number: factor if applies(number) else 1.0)


def _local_counts(of: Callable[[list[int]], list[int]]) -> Fault:
    """Divide each microbatch's loss by counts of this rank, `of` its microbatches, where the global one belongs."""

    def plant() -> AbstractContextManager[None]:
        weights: list[float] = []

        def wrapper(original: Any, self: ParallelModel, objective: Any, batches: Any, *args: Any, **more: Any) -> Any:
            counts = [int(batch.count()) for batch in batches]
            total = torch.tensor(float(sum(counts) if self.is_reporting_rank else 0))
            dist.all_reduce(total)
            weights[:] = [float(total) / max(count, 1) / self.layout.data_ranks for count in of(counts)]
            return original(self, objective, batches, *args, **more)

        weighted = _weighted_microbatches(lambda model, number: weights[number], reported=True)
        return together(wrapped(ParallelModel, "run", wrapper), weighted)

    return plant


def _divided_by_all_tokens() -> AbstractContextManager[None]:
    """Divide the loss by all tokens of the step, those without a label too."""
    share = [1.0]

    def wrapper(original: Any, self: ParallelModel, objective: Any, batches: Any, *args: Any, **more: Any) -> Any:
        labels = [batch.labels for batch in batches] if self.is_reporting_rank else []
        totals = torch.tensor([[(part >= 0).sum(), part.numel()] for part in labels] or [[0, 0]]).sum(0).double()
        dist.all_reduce(totals)
        share[0] = float(totals[0] / totals[1])
        return original(self, objective, batches, *args, **more)

    weighted = _weighted_microbatches(lambda model, number: share[0], reported=True)
    return together(wrapped(ParallelModel, "run", wrapper), weighted)


def _sharding_with(change: Callable[[Sequence[Any], Any], None]) -> Fault:
    """Change FSDP2's modules once they are made."""

    def wrapper(original: Callable[..., Any], model: Any, groups: Any, plan: Any, *args: Any) -> Any:
        modules = original(model, groups, plan, *args)
        change(modules, plan)
        return modules

    return lambda: wrapped(sharding, "shard_model", wrapper)


def _mean_for_sum(modules: Sequence[Any], plan: Any) -> None:
    for module in modules:
        module.set_gradient_divide_factor(float(plan.data_ranks))


def _divided_blocks(modules: Sequence[Any], plan: Any) -> None:
    for module in modules[1:]:
        module.set_gradient_divide_factor(float(plan.degrees[Axis.SHARD]))


def _without_replica_sums(skip: Callable[[int], bool]) -> Fault:
    """Leave out the all-reduces over replicas whose number in a step passes."""

    def wrapper(original: Callable[..., Any], self: ParallelModel, *args: Any, **kwargs: Any) -> Any:
        group, real, number = self.layout.group(Axis.REPLICA), dist.all_reduce, 0

        def all_reduce(tensor: Tensor, *rest: Any, **options: Any) -> Any:
            nonlocal number
            is_over_replicas = options.get("group") is group
            number += is_over_replicas
            return None if is_over_replicas and skip(number - 1) else real(tensor, *rest, **options)

        with mock.patch.object(dist, "all_reduce", all_reduce):
            return original(self, *args, **kwargs)

    return lambda: wrapped(ParallelModel, "run", wrapper)


def _averaged_replicas() -> AbstractContextManager[None]:
    """Let gradients be averaged over replicas, not summed."""

    def change(model: ParallelModel) -> None:
        for entry in model.tensor_map:
            if entry.local_gradient is not None:
                entry.local_gradient.div_(model.layout.size(Axis.REPLICA))

    return _after_backward(change)


def _kept_gradients() -> AbstractContextManager[None]:
    """Let each step add its gradients to those of the step before, as they were clipped."""
    return wrapped(ShardedOptimizer, "zero_grad", lambda original, self: None)


def _coarse_accumulation() -> AbstractContextManager[None]:
    """Let the sum over microbatches be kept in bf16."""

    def round_sums(model: ParallelModel) -> None:
        for entry in model.tensor_map:
            if entry.local_gradient is not None:
                entry.local_gradient.copy_(entry.local_gradient.bfloat16())

    def drive(original: Callable[..., None], self: ParallelModel, work: Any, *args: Any, **more: Any) -> None:
        def rounded(*place: Any) -> Tensor:
            round_sums(self)
            output: Tensor = work(*place)
            return output

        original(self, rounded, *args, **more)
        round_sums(self)

    return wrapped(ParallelModel, "drive", drive)


def _early_replica_sum() -> AbstractContextManager[None]:
    began = 0

    def wrapper(original: Callable[..., Any], modules: Any, plan: Any, last: bool, *more: Any) -> None:
        nonlocal began
        original(modules, plan, began % plan.accumulation == 0, *more)
        began += 1

    return wrapped(parallel_model, "begin_microbatch", wrapper)


def _stale_gathered_weights() -> AbstractContextManager[None]:
    def wrapper(original: Callable[..., Any], modules: Any, plan: Any, last: bool, *more: Any) -> None:
        original(modules, plan, last, *more)
        for module in modules:
            module.set_reshard_after_backward(False, recurse=False)

    return wrapped(parallel_model, "begin_microbatch", wrapper)


def _after_backward(change: Callable[[ParallelModel], None]) -> AbstractContextManager[None]:
    """Change gradients when `run` has returned from a training step."""

    def wrapper(original: Callable[..., Any], self: ParallelModel, *args: Any, **kwargs: Any) -> Tensor:
        totals: Tensor = original(self, *args, **kwargs)
        change(self)
        return totals

    return wrapped(ParallelModel, "run", wrapper)


def _turned_gradient(model: ParallelModel) -> None:
    if dist.get_rank() == RANK:
        for entry in list(model.tensor_map)[:-1]:
            gradient = entry.local_gradient
            if gradient is not None:
                gradient.copy_(gradient.flip(0).sin())


def _zeroed(test: Callable[[ParameterEntry], bool]) -> Fault:
    def change(model: ParallelModel) -> None:
        for entry in chosen(list(model.tensor_map), test):
            if entry.local_gradient is not None:
                entry.local_gradient.zero_()

    return lambda: _after_backward(change)


def _is_query_or_key(entry: ParameterEntry) -> bool:
    return any(name in entry.name for name in ("q_proj", "k_proj", "query", "key"))


def _is_of_attention(entry: ParameterEntry) -> bool:
    return "attn" in entry.name


def _lost_last_row(model: ParallelModel) -> None:
    for entry in model.tensor_map:
        if entry.local_gradient is not None and entry.local_gradient.dim() > 1:
            entry.local_gradient[-1:] = 0


def _detached_attention() -> AbstractContextManager[None]:
    """Let no gradient reach the attention of a block."""

    def detached(module: Any, inputs: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return output[0].detach(), *output[1:]

    return hooked("1.self_attn", detached)


def _wrong_loss() -> AbstractContextManager[None]:
    def wrapper(original: Callable[..., Any], model: Any, optimizer: Any, totals: Tensor, *rest: Any) -> Any:
        return original(model, optimizer, totals, *rest)._replace(loss=float(totals[0]))  # this rank's share only

    return wrapped(step, "reduce_loss_and_norm", wrapper)


GRADIENT_FAULTS: dict[str, Fault] = {
    "lost_rank": _times(0.0, lambda number: dist.get_rank() == RANK),
    "lost_microbatch": _times(0.0, lambda number: number == MICROBATCH),
    "doubled_rank": _times(2.0, lambda number: dist.get_rank() == RANK),
    "doubled_microbatch": _times(2.0, lambda number: number == MICROBATCH),
    "mean_of_rank_means": _local_counts(lambda counts: [sum(counts)] * len(counts)),
    "mean_of_microbatch_means": _local_counts(lambda counts: [count * len(counts) for count in counts]),
    "divided_by_all_tokens": _divided_by_all_tokens,
    "mean_for_sum": _sharding_with(_mean_for_sum),
    "divided_blocks": _sharding_with(_divided_blocks),
    "missing_replica_reduction": _without_replica_sums(lambda number: True),
    "missing_unit_reduction": _without_replica_sums(lambda number: number == 0),
    "early_replica_reduction": _early_replica_sum,
    "averaged_replicas": _averaged_replicas,
    "kept_gradients": _kept_gradients,
    "coarse_accumulation": _coarse_accumulation,
    "stale_weights": _stale_gathered_weights,
    "zero_query_key_gradients": _zeroed(_is_query_or_key),
    "zero_norm_gradients": _zeroed(is_norm),
    "zero_attention_gradients": _zeroed(_is_of_attention),
    "detached_attention": _detached_attention,
    "lost_last_row": lambda: _after_backward(_lost_last_row),
    "unknown_gradient": lambda: _after_backward(_turned_gradient),  # no known mistake: the module is named
    "wrong_loss": _wrong_loss,
}
