"""Faults of one axis: tensor and sequence parallelism, context, pipeline stages, expert routing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.kernels import dropout, linear, loss
from shardwise.kernels.attention import ring
from shardwise.model.discover import find_ties
from shardwise.parallel import context, regions
from shardwise.parallel.model import ModelPart, ParallelModel
from shardwise.parallel.transforms import tensor
from shardwise.testing.faults.patching import MICROBATCH, RANK, Fault, together, wrapped
from shardwise.training import setup
from shardwise.training.objectives.language_modelling import LanguageModelling


def _no_sum_at_entry() -> AbstractContextManager[None]:
    return wrapped(regions, "copy_to_region", lambda original, values, group: values.view_as(values))


def _bias_of_every_rank() -> AbstractContextManager[None]:
    def wrapper(original: Callable[..., None], module: Any, split: Any, boundary: Any) -> None:
        original(module, split, boundary)
        forward = module.forward
        if module.bias is not None:
            module.forward = lambda values: forward(values) + (boundary.group.size() - 1) * module.bias

    return wrapped(tensor, "_sum_output", wrapper)


def _without_partial_sums(keep: Callable[[ParallelModel, Any], bool]) -> Fault:
    """Leave out sums of partial gradients over groups that `keep(group)` does not keep."""

    def wrapper(original: Callable[..., None], self: ParallelModel) -> None:
        kept = tuple((names, group) for names, group in self.partial if keep(self, names))
        with mock.patch.object(self, "partial", kept):
            original(self)

    return lambda: wrapped(ParallelModel, "sum_shared_gradients", wrapper)


def _are_split(model: ParallelModel, names: Any) -> bool:
    return all(model.tensor_map[name].split is not None for name in names)


def _local_smoothing() -> AbstractContextManager[None]:
    def wrapper(original: Callable[..., list[Tensor]], local: Any, columns: Any, vocabulary: Any) -> list[Tensor]:
        return [*original(local, columns, vocabulary)[:2], *columns[1:]]

    return wrapped(loss, "_normaliser", wrapper)


def _unreduced_routes() -> AbstractContextManager[None]:
    def of_rows(original: Any, self: Any, index: Tensor, weights: Tensor) -> Any:
        return regions.gather_rows(index, self.rows), regions.gather_whole_sequence(weights, self.rows)

    return together(
        wrapped(regions.RegionBoundary, "routes_input", lambda original, self, index, weights: (index, weights)),
        wrapped(regions.SequenceRegionBoundary, "routes_input", of_rows),
    )


def _first_columns_of_mask() -> AbstractContextManager[None]:
    def wrapper(original: Callable[..., Tensor], values: Tensor, rate: float, name: str, columns: Any = None) -> Tensor:
        return original(values, rate, name, None if columns is None else (0, columns[1]))

    return wrapped(dropout, "dropout", wrapper)


def _broken_tie() -> AbstractContextManager[None]:
    def wrapper(original: Callable[..., Any], job: Any) -> nn.Module:
        model: nn.Module = original(job)
        for _, *others in find_ties(model):
            for name in others:
                owner, _, leaf = name.rpartition(".")
                fresh = nn.Parameter(torch.empty_like(model.get_parameter(name)))
                model.get_submodule(owner).register_parameter(leaf, fresh)
        return model

    return wrapped(setup, "build_model", wrapper)


def _lost_tied_gradient() -> AbstractContextManager[None]:
    def wrapper(original: Callable[..., Any], self: ParallelModel) -> None:
        own = [] if dist.get_rank() != RANK else self.tensor_map.gradients(list(self.tied))
        before = [gradient.clone() for gradient in own]
        original(self)
        for gradient, part in zip(own, before, strict=True):
            gradient.copy_(part)

    return wrapped(ParallelModel, "sum_shared_gradients", wrapper)


def _unsummed_ties() -> AbstractContextManager[None]:
    return wrapped(ParallelModel, "_tied", lambda original, self: iter(()))


def _ties_twice() -> AbstractContextManager[None]:
    """Let gradients of tied parameters be summed over stages once more."""

    def wrapper(original: Callable[..., Any], self: ParallelModel) -> None:
        original(self)
        for gradient in self.tensor_map.gradients(list(self.tied)):
            gradient.mul_(2)

    return wrapped(ParallelModel, "sum_shared_gradients", wrapper)


def _crossed_heads() -> AbstractContextManager[None]:
    """Let query heads take key-value heads in turns, where neighbours share one."""

    def wrapper(original: Callable[..., Tensor], keys: Tensor, query: Tensor) -> Tensor:
        return keys.repeat(1, query.shape[1] // keys.shape[1], 1, 1)

    return wrapped(ring, "repeat_key_heads", wrapper)


def _biases_of_first_heads() -> AbstractContextManager[None]:
    def wrapper(original: Callable[..., Any], values: Any, heads: int, local: slice) -> Any:
        return original(values, heads, slice(0, local.stop - local.start))

    return wrapped(tensor, "local_heads", wrapper)


def _lost_target() -> AbstractContextManager[None]:
    """Let only the first rank of a vocabulary look for the target's logit."""

    def wrapper(original: Callable[..., tuple[Tensor, Tensor]], targets: Tensor, vocabulary: Any) -> Any:
        index, is_local = original(targets, vocabulary)
        return index, is_local & (vocabulary is None or vocabulary.first == 0)

    return wrapped(loss, "_local_index", wrapper)


def _unmasked_lookup() -> AbstractContextManager[None]:
    """Let every rank of a vocabulary give a row for ids that another one holds."""

    def wrapper(original: Callable[..., None], embedding: Any, vocabulary: Any) -> None:
        original(embedding, vocabulary)

        def forward(ids: Tensor) -> Tensor:
            rows = (ids - vocabulary.first) % len(embedding.weight)
            return regions.reduce_from_region(nn.functional.embedding(rows, embedding.weight), vocabulary.group)

        embedding.forward = forward

    return wrapped(tensor, "_look_up_part", wrapper)


def _lost_last_label() -> AbstractContextManager[None]:
    def wrapper(original: Callable[..., Tensor], labels: Tensor, *args: Any) -> Tensor:
        scale = original(labels, *args).clone()
        scale.view(-1)[-1] = 0
        return scale

    return wrapped(loss, "label_scale", wrapper)


def _stage_outputs_with(change: Callable[[Tensor, int], Tensor]) -> Fault:
    """Change what a stage hands on: `change(hidden states, number of the microbatch)`."""

    def plant() -> AbstractContextManager[None]:
        number = 0

        def wrapper(original: Callable[..., Tensor], self: ModelPart) -> Tensor:
            nonlocal number
            number += 1
            return change(original(self), number - 1)

        return wrapped(ModelPart, "boundary_output", wrapper)

    return plant


def _rounded_output(values: Tensor, number: int) -> Tensor:
    return values.bfloat16().to(values.dtype)


def _without_gradient(values: Tensor, number: int) -> Tensor:
    is_lost = number % 8 == MICROBATCH  # of the eight microbatches of a step
    return values.detach() + 0.0 * values if is_lost else values


def _rows_in_other_order() -> AbstractContextManager[None]:
    """Let the parts of sequences be put together in the wrong order."""

    def wrapper(original: Callable[..., Tensor], values: Tensor, rows: Any) -> Tensor:
        return original(values, rows).roll(1, dims=1)

    return wrapped(regions, "gather_to_region", wrapper)


def _masks_of_first_rows() -> AbstractContextManager[None]:
    """Let ranks that share sequences drop by the place in their own part."""

    def wrapper(original: Callable[..., Tensor], self: Any, values: Tensor) -> Tensor:
        scattered = original(self, values)
        scope = dropout.active_scope()
        if scope is not None:
            scope.positions = (0, scattered.shape[1])
        return scattered

    return wrapped(regions.SequenceRegionBoundary, "scatter_sequence", wrapper)


def _sees_ahead() -> AbstractContextManager[None]:
    def wrapper(original: Callable[..., Any], group: Any, scale: float, causal: bool, *rest: Any) -> Any:
        return original(group, scale, False, *rest)

    return wrapped(context, "RingSettings", wrapper)


def _crossed_ulysses_heads() -> AbstractContextManager[None]:
    def wrapper(original: Callable[..., Tensor], values: Tensor, group: Any) -> Tensor:
        return original(values.flip(2), group)

    return wrapped(context, "rows_for_heads", wrapper)


def _other_microbatch_order() -> AbstractContextManager[None]:
    """Let the last stage take the labels of the microbatches in reverse."""
    order: list[Any] = []
    number = 0

    def run(original: Any, self: ParallelModel, objective: Any, microbatches: Any, *args: Any, **more: Any) -> Any:
        nonlocal number
        order[:], number = list(microbatches)[::-1], 0
        return original(self, objective, microbatches, *args, **more)

    def loss_of(original: Any, self: Any, microbatch: Any, output: Any) -> Any:
        nonlocal number
        other, number = order[number % len(order)], number + 1
        return original(self, dataclasses.replace(microbatch, labels=other.labels), output)

    return together(wrapped(ParallelModel, "run", run), wrapped(LanguageModelling, "loss", loss_of))


def _mean_over_microbatches() -> AbstractContextManager[None]:
    def wrapper(
        original: Any, self: ParallelModel, objective: Any, microbatches: Any, step: int, seed: Tensor | None = None
    ) -> Any:
        return original(self, objective, microbatches, step, seed if seed is None else seed / len(microbatches))

    return wrapped(ParallelModel, "run", wrapper)


def _overwritten_weight_gradient() -> AbstractContextManager[None]:
    def wrapper(original: Callable[..., None], parameter: Any, gradient: Tensor) -> None:
        parameter.grad = None
        original(parameter, gradient)

    return wrapped(linear, "_add", wrapper)


def _split_with(change: Callable[[Any, Any, Any], Any]) -> Fault:
    """Change this context rank's part of a microbatch: `change(context, microbatch, shard)`."""

    def wrapper(original: Callable[..., Any], self: Any, microbatch: Any) -> Any:
        part, shard = original(self, microbatch)
        return change(self, part, shard), shard

    return lambda: wrapped(context.ContextParallel, "split", wrapper)


def _labels_shifted_inside(of: Any, part: Any, shard: Any) -> Any:
    return dataclasses.replace(part, labels=part.labels.roll(1, dims=1))


def _positions_from_zero(of: Any, part: Any, shard: Any) -> Any:
    ids = part.inputs["input_ids"]
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    return dataclasses.replace(part, inputs=part.inputs | {"position_ids": positions})


def _isolated_inside_part() -> AbstractContextManager[None]:
    def wrapper(original: Callable[..., Tensor], documents: Tensor, b: Tensor, q: Tensor, k: Tensor) -> Tensor:
        half = documents.shape[1] // 2
        return original(documents, b, q, k) | ((q < half) != (k < half))

    return wrapped(context, "same_document", wrapper)


def _short_ring() -> AbstractContextManager[None]:
    """Keep the gradients that go round a ring where they are at the last hop."""
    hops = 0

    def backward(original: Any, ctx: Any, *gradients: Tensor) -> Any:
        nonlocal hops
        hops = 2 * ctx.ring.group.size() - 1
        result = original(ctx, *gradients)
        hops = 0
        return result

    def pass_on(original: Any, values: Any, group: Any) -> Any:
        nonlocal hops
        hops -= 1
        return list(values) if hops == 0 else original(values, group)

    patched = mock.patch.object(ring._RingAttention, "backward", staticmethod(lambda ctx, *g: backward(own, ctx, *g)))
    own = ring._RingAttention.backward
    return together(patched, wrapped(ring, "pass_on", pass_on))


AXIS_FAULTS: dict[str, Fault] = {
    "no_sum_at_region_entry": _no_sum_at_entry,
    "bias_of_every_rank": _bias_of_every_rank,
    "unsummed_key_value_heads": _without_partial_sums(lambda model, names: not _are_split(model, names)),
    "unsummed_norms": _without_partial_sums(_are_split),
    "local_label_smoothing": _local_smoothing,
    "unreduced_routes": _unreduced_routes,
    "first_columns_of_mask": _first_columns_of_mask,
    "broken_tie": _broken_tie,
    "gradient_copies_apart": _lost_tied_gradient,  # of a stage that is not the first
    "unsummed_ties": _unsummed_ties,
    "ties_twice": _ties_twice,
    "crossed_heads": _crossed_heads,
    "biases_of_first_heads": _biases_of_first_heads,
    "lost_target": _lost_target,
    "unmasked_lookup": _unmasked_lookup,
    "lost_last_label": _lost_last_label,
    "rounded_stage_output": _stage_outputs_with(_rounded_output),
    "lost_stage_gradient": _stage_outputs_with(_without_gradient),
    "rows_in_other_order": _rows_in_other_order,
    "masks_of_first_rows": _masks_of_first_rows,
    "attention_ahead": _sees_ahead,
    "crossed_ulysses_heads": _crossed_ulysses_heads,
    "other_microbatch_order": _other_microbatch_order,
    "mean_over_microbatches": _mean_over_microbatches,
    "overwritten_weight_gradient": _overwritten_weight_gradient,
    "shifted_label_in_part": _split_with(_labels_shifted_inside),
    "positions_of_part": _split_with(_positions_from_zero),
    "isolated_inside_part": _isolated_inside_part,
    "short_ring": _short_ring,
}
