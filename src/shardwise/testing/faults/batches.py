"""Faults of what a step reads and draws: samples, labels, documents, dropout, weights at start, evaluation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.data import loader, prepare
from shardwise.data.loader import Stream
from shardwise.job.axes import Axis
from shardwise.kernels import dropout
from shardwise.kernels.attention import interface
from shardwise.kernels.dropout import DropoutScope
from shardwise.parallel.model import ParallelModel
from shardwise.testing import oracle_data, oracle_rows, run_checks
from shardwise.testing.faults.patching import RANK, Fault, everywhere, wrapped
from shardwise.training import init, setup
from shardwise.training.objectives.language_modelling import LanguageModelling

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


def _repeated_sample() -> AbstractContextManager[None]:
    def wrapper(original: Callable[..., int], seed: int, counter: int, size: int) -> int:
        return original(seed, counter, size) // 2

    return everywhere("order", wrapper, loader, oracle_data, oracle_rows, run_checks)


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

    def wrapper(original: Callable[..., Any], self: ParallelModel, *args: Any) -> Any:
        def scope_of(*values: Any, **more: Any) -> DropoutScope:
            scope = made(*values, **more)
            change(self, scope)
            return scope

        with mock.patch("shardwise.parallel.model.DropoutScope", scope_of):
            return original(self, *args)

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


def _mode_always(mode: bool) -> Fault:
    return lambda: wrapped(ParallelModel, "train", lambda original, self, wanted=True: original(self, mode))


BATCH_FAULTS: dict[str, Fault] = {
    "counted_padding": _counted_padding,
    "equal_rows": _equal_rows,
    "shifted_samples": _late_sample,
    "repeated_sample": _repeated_sample,
    "missing_document_ends": _no_document_ends,
    "shifted_label": _shifted_label,
    "leaked_document": _leaked_document,
    "stale_dropout": _scope_with(_step_zero),
    "dropout_by_stage": _scope_with(_seed_of_stage),
    "dropout_by_local_row": _scope_with(_local_rows),
    "one_dropout_mask": _one_mask,
    "missing_attention_dropout": _no_attention_dropout,
    "fused_dropout_rate": _fused_rate,
    "other_recomputed_mask": _other_recomputed_mask,
    "unequal_start": _unequal_start,
    "child_initializer": _child_wins,
    "wrong_evaluation": _evaluation_of_one_rank,
    "trained_evaluation": _mode_always(True),
    "left_in_evaluation": _mode_always(False),
}
