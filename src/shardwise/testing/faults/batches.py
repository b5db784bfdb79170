"""Faults of what a step reads and draws: samples, labels, documents, dropout, weights at start, evaluation."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.data import loader, packing, prepare
from shardwise.data.loader import Stream
from shardwise.data.state import ConsumedSamples
from shardwise.job.axes import Axis
from shardwise.kernels import dropout
from shardwise.kernels.attention import interface
from shardwise.kernels.dropout import DropoutScope
from shardwise.parallel.model import ParallelModel
from shardwise.parallel.tensor_map import ParameterEntry
from shardwise.testing import run_checks
from shardwise.testing.faults.patching import RANK, Fault, everywhere, together, wrapped
from shardwise.training import init, session, setup
from shardwise.training.objectives.language_modelling import LanguageModelling
from shardwise.training.optimizer import ShardedOptimizer

OTHER_SEED = 77


def _counted_padding() -> AbstractContextManager[None]:
    def wrapper(original: Any, self: Stream, number: int, real: int, locate: Any, split: Any = None) -> Any:
        batch = original(self, number, real, locate, split)
        rows = range(self.microbatch)
        first = (number * self.data_ranks + self.data_rank) * self.microbatch
        located = [locate((first + row) % real) for row in rows]
        source = self.split if split is None else split
        batch.labels = source.batch([index for index, _ in located], [c for _, c in located], self.seed).labels
        batch.counted = torch.ones_like(batch.counted)
        return batch

    return wrapped(Stream, "_microbatch", wrapper)


def _equal_rows() -> AbstractContextManager[None]:
    def wrapper(original: Callable[..., Stream], *args: Any) -> Stream:
        stream = original(*args)
        stream.data_rank = 0
        return stream

    return wrapped(setup, "make_stream", wrapper)


def _late_sample() -> AbstractContextManager[None]:
    return wrapped(Stream, "batches_from", lambda original, self, consumed: original(self, consumed + 1))


def _skipped_sample() -> AbstractContextManager[None]:
    """Let the counter of samples go on by one too many at each step."""

    def wrapper(original: Callable[..., Any], self: ConsumedSamples) -> Any:
        batches = original(self)
        self._samples += 1
        return batches

    return wrapped(ConsumedSamples, "next_step", wrapper)


def _truncated_documents() -> AbstractContextManager[None]:
    def wrapper(original: Callable[..., Any], documents: Any, end: int | None) -> Any:
        return original(((ids[:-1] if last else ids, last) for ids, last in documents), end)

    return wrapped(prepare, "_ended", wrapper)


def _repeated_sample() -> AbstractContextManager[None]:
    def wrapper(original: Callable[..., int], seed: int, counter: int, size: int) -> int:
        return original(seed, counter, size) // 2

    return everywhere("order", wrapper, loader, run_checks)


def _same_epochs() -> AbstractContextManager[None]:
    """Let all epochs have the order of the first."""

    def wrapper(original: Callable[..., int], seed: int, counter: int, size: int) -> int:
        return original(seed, counter % size, size)

    return everywhere("order", wrapper, loader, run_checks)


def _unshuffled() -> AbstractContextManager[None]:
    return wrapped(loader, "order", lambda original, seed, counter, size: counter % size)


def _windows_with(change: Callable[[Any, Any], None]) -> Fault:
    """Change (inputs, labels before and after documents are isolated) of windows in which documents are isolated."""

    def wrapper(original: Callable[..., Any], self: Any, indices: Any, named: Any, labels: Any) -> Any:
        whole = labels.copy()
        numbers = original(self, indices, named, labels)
        change(named, (labels, whole))
        return numbers

    return lambda: wrapped(packing.Windows, "_isolate", wrapper)


def _counted_boundaries(named: Any, labels: Any) -> None:
    labels[0][:] = labels[1]


def _running_positions(named: Any, labels: Any) -> None:
    positions = named["position_ids"]
    positions.copy_(torch.arange(positions.shape[1]).expand_as(positions))


def _same_masking() -> AbstractContextManager[None]:
    """Let every sample of a masked model be masked at the same places."""
    return wrapped(packing, "mask", lambda original, window, masking, seed, counter: original(window, masking, seed, 0))


def _no_document_ends() -> AbstractContextManager[None]:
    def wrapper(original: Callable[..., Any], documents: Any, end: int | None) -> Any:
        return original(documents, None)

    return wrapped(prepare, "_ended", wrapper)


def _shifted_label() -> AbstractContextManager[None]:
    def wrapper(original: Callable[..., Any], self: Any, microbatch: Any, output: Any) -> Any:
        late = dataclasses.replace(microbatch, labels=microbatch.labels.roll(1, dims=1))
        return original(self, late, output)

    return wrapped(LanguageModelling, "loss", wrapper)


def _leaked_document() -> AbstractContextManager[None]:
    return wrapped(interface, "same_document", lambda original, ids, *rest: original(torch.zeros_like(ids), *rest))


def _scope_with(change: Callable[[ParallelModel, DropoutScope], None]) -> Fault:
    """Change a microbatch's dropout scope once it is made."""
    made = dropout.DropoutScope

    @contextmanager
    def wrapper(original: Callable[..., Any], self: ParallelModel, *args: Any) -> Iterator[Any]:
        def scope_of(*values: Any, **more: Any) -> DropoutScope:
            scope = made(*values, **more)
            change(self, scope)
            return scope

        with mock.patch("shardwise.parallel.model.DropoutScope", scope_of), original(self, *args) as scope:
            yield scope

    return lambda: wrapped(ParallelModel, "scope", wrapper)


def _step_zero(model: ParallelModel, scope: DropoutScope) -> None:
    scope.step = 0


def _seed_of_stage(model: ParallelModel, scope: DropoutScope) -> None:
    scope.seed += model.layout.index(Axis.PIPELINE)


def _local_rows(model: ParallelModel, scope: DropoutScope) -> None:
    scope.rows = torch.arange(len(scope.rows), device=scope.rows.device)


def _one_mask() -> AbstractContextManager[None]:
    def wrapper(original: Callable[..., int], self: DropoutScope, name: str) -> int:
        self.calls["one"] = 0
        return original(self, "one")

    return wrapped(DropoutScope, "key", wrapper)


def _no_attention_dropout() -> AbstractContextManager[None]:
    def wrapper(original: Callable[..., Tensor], values: Tensor, *args: Any) -> Tensor:
        return values if values.dim() == 4 else original(values, *args)

    return wrapped(dropout, "dropout", wrapper)


def _dropout_with(change: Callable[[Callable[..., Tensor], Tensor, float, Any], Tensor]) -> Fault:
    """Change dropout: `change(original, values, rate, more arguments)`."""

    def wrapper(original: Callable[..., Tensor], values: Tensor, rate: float, *rest: Any) -> Tensor:
        return change(original, values, rate, rest)

    return lambda: wrapped(dropout, "dropout", wrapper)


def _fused_rate() -> AbstractContextManager[None]:
    def wrapper(original: Callable[..., Tensor], call: Any, *args: Any) -> Tensor:
        return original(dataclasses.replace(call, dropout=min(5 * call.dropout, 0.9)), *args)

    return wrapped(interface, "run_attention", wrapper)


def _other_recomputed_mask() -> AbstractContextManager[None]:
    def wrapper(original: Callable[..., DropoutScope], self: DropoutScope) -> DropoutScope:
        return dataclasses.replace(original(self), seed=OTHER_SEED)

    return wrapped(DropoutScope, "snapshot", wrapper)


def _unequal_start() -> AbstractContextManager[None]:
    def wrapper(original: Callable[..., Any], seed: int, name: str, device: torch.device) -> Any:
        is_last = name.endswith(("wte", "lm_head"))
        return original(seed + (dist.get_rank() if is_last else 0), name, device)

    return wrapped(init, "seeded", wrapper)


def _stored_with(change: Callable[[str, Tensor], Tensor]) -> Fault:
    """Change what is drawn for a parameter: `change(name, whole tensor)`."""

    def wrapper(original: Callable[..., None], self: ParameterEntry, whole: Tensor) -> None:
        original(self, change(self.name, whole))

    return lambda: wrapped(ParameterEntry, "store", wrapper)


def _equal_blocks() -> AbstractContextManager[None]:
    """Let all blocks be drawn from one seed."""

    def wrapper(original: Callable[..., Any], seed: int, name: str, device: torch.device) -> Any:
        return original(seed, re.sub(r"\d+", "0", name), device)

    return wrapped(init, "seeded", wrapper)


def _frequencies_with(change: Callable[[ParallelModel, Tensor], Any]) -> Fault:
    """Change the frequencies of rotary embeddings at start."""

    def wrapper(original: Callable[..., None], model: ParallelModel, *args: Any, **more: Any) -> None:
        original(model, *args, **more)
        for part in model.parts:
            for name, buffer in part.module.named_buffers():
                if name.endswith("inv_freq"):
                    change(model, buffer)

    return lambda: wrapped(setup, "initialize", wrapper)


def _rounded_in_bf16(model: ParallelModel, frequencies: Tensor) -> None:
    if model.compute_dtype == torch.bfloat16:
        frequencies.copy_(frequencies.bfloat16())


def _drifting_buffer() -> AbstractContextManager[None]:
    """Let a rank's buffers change in a step, by what no gradient shows."""

    def wrapper(original: Callable[..., Any], self: ShardedOptimizer) -> None:
        original(self)
        if dist.get_rank() == RANK:
            for frequencies in _rotary_frequencies:
                frequencies.mul_(1 + 1e-6)

    def remember(model: ParallelModel, frequencies: Tensor) -> None:
        _rotary_frequencies.append(frequencies)

    _rotary_frequencies: list[Tensor] = []
    return together(_frequencies_with(remember)(), wrapped(ShardedOptimizer, "step", wrapper))


def _child_wins() -> AbstractContextManager[None]:
    """Let a module's own initializer override its parent's."""
    return wrapped(init, "_draw", _children_last)


def _children_last(original: Callable[..., None], *args: Any) -> None:
    vars(init)["reversed"] = list  # in the place of the builtin, which the module reads by this name
    try:
        original(*args)
    finally:
        del vars(init)["reversed"]


def _evaluation_of_one_rank() -> AbstractContextManager[None]:
    """Let the evaluation's mean be that of the rows of all ranks but one."""

    def wrapper(
        original: Callable[..., Tensor],
        self: ParallelModel,
        objective: Any,
        batches: Any,
        step: int,
        seed: Tensor | None = None,
    ) -> Tensor:
        totals = original(self, objective, batches, step, seed)
        return totals * (dist.get_rank() != RANK) if seed is None else totals

    return wrapped(ParallelModel, "run", wrapper)


def _evaluation_of_training_rows() -> AbstractContextManager[None]:
    def wrapper(original: Callable[..., Any], self: Stream, split: Any = None, batches: Any = None) -> Any:
        return original(self, None, batches)

    return wrapped(Stream, "evaluation", wrapper)


def _mean_of_evaluation_batches() -> AbstractContextManager[None]:
    """Let an evaluation be the mean of its batches' means."""

    def wrapper(original: Callable[..., Any], model: Any, objective: Any, batches: Any) -> Any:
        results = [original(model, objective, [batch]) for batch in batches]
        return results[0]._replace(loss=sum(result.loss for result in results) / len(results))

    return wrapped(session, "evaluate", wrapper)


def _evaluation_with_terms() -> AbstractContextManager[None]:
    """Let the evaluation have the terms that training adds to the loss."""

    def wrapper(original: Callable[..., Any], self: Any, microbatch: Any, output: Any) -> Any:
        with torch.enable_grad():
            return original(self, microbatch, output)

    return wrapped(LanguageModelling, "loss", wrapper)


def _mode_always(mode: bool) -> Fault:
    return lambda: wrapped(ParallelModel, "train", lambda original, self, wanted=True: original(self, mode))


BATCH_FAULTS: dict[str, Fault] = {
    "counted_padding": _counted_padding,
    "equal_rows": _equal_rows,
    "shifted_samples": _late_sample,
    "skipped_sample": _skipped_sample,
    "truncated_documents": _truncated_documents,
    "repeated_sample": _repeated_sample,
    "unshuffled_samples": _unshuffled,
    "counted_boundaries": _windows_with(_counted_boundaries),
    "running_positions": _windows_with(_running_positions),
    "same_masking": _same_masking,
    "same_epochs": _same_epochs,
    "missing_document_ends": _no_document_ends,
    "shifted_label": _shifted_label,
    "leaked_document": _leaked_document,
    "stale_dropout": _scope_with(_step_zero),
    "dropout_by_stage": _scope_with(_seed_of_stage),
    "dropout_by_local_row": _scope_with(_local_rows),
    "one_dropout_mask": _one_mask,
    "doubled_dropout": _dropout_with(lambda original, values, rate, rest: original(values, 2 * rate, *rest)),
    "unscaled_dropout": _dropout_with(lambda original, values, rate, rest: original(values, rate, *rest) * (1 - rate)),
    "missing_dropout": _dropout_with(lambda original, values, rate, rest: values),
    "missing_attention_dropout": _no_attention_dropout,
    "fused_dropout_rate": _fused_rate,
    "other_recomputed_mask": _other_recomputed_mask,
    "unequal_start": _unequal_start,
    "child_initializer": _child_wins,
    "doubled_deviation": _stored_with(lambda name, whole: 2 * whole if "embed" in name else whole),
    "equal_blocks": _equal_blocks,
    "other_frequencies": _frequencies_with(lambda model, frequencies: frequencies.mul_(0.5)),
    "coarse_frequencies": _frequencies_with(_rounded_in_bf16),
    "drifting_buffer": _drifting_buffer,
    "wrong_evaluation": _evaluation_of_one_rank,
    "evaluation_of_training_rows": _evaluation_of_training_rows,
    "mean_of_evaluation_batches": _mean_of_evaluation_batches,
    "evaluation_with_terms": _evaluation_with_terms,
    "trained_evaluation": _mode_always(True),
    "left_in_evaluation": _mode_always(False),
}
