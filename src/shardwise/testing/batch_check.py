"""The microbatches that ranks were fed, against the oracle's own reading: whose rows, which samples, what they hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.data.batch import Batch, can_be_ignored
from shardwise.plan.plan import Plan
from shardwise.testing.capture import Captured
from shardwise.testing.oracle_data import EVALUATION, NOT_COUNTED, Rows, Source, shortened


class Misread(NamedTuple):
    """The first thing that is wrong with what a step was fed: the fault's name, and a sentence."""

    fault: str
    sentence: str


def find_misread(plan: Plan, source: Source, ours: Captured) -> Misread | None:
    """Return what is wrong with the microbatches of a step; None where every rank got its rows, and right ones."""
    if misread := _other_length(plan, ours) or _shifted(plan, ours):
        return misread
    for rank, (batches, data_rank) in enumerate(zip(ours.batches, ours.data_ranks, strict=True)):
        for number, batch in enumerate(batches):
            expected = _counters(plan, ours.step, data_rank, number)
            real = _real_rows(plan, ours.step, data_rank, number)
            misread = (
                _wrong_rows(plan, ours, rank, number, batch.rows.tolist(), expected)
                or _counted_padding(batch, real)
                or _wrong_content(batch, source, rank, real, _cuts(plan, ours.step))
            )
            if misread:
                return misread
    return None


def find_misread_evaluation(plan: Plan, source: Source, ours: Captured) -> str:
    """Return what is wrong with the rows of the evaluation behind a step; empty where ranks got those held out."""
    for rank, (batches, data_rank) in enumerate(zip(ours.evaluation_batches, ours.data_ranks, strict=True)):
        for index, batch in enumerate(batches if source.validation_size else ()):
            turn, number = divmod(index, plan.accumulation)
            start = turn * plan.sequences_per_step
            size = min(plan.sequences_per_step, source.validation_size - start)
            first = (number * plan.data_ranks + data_rank) * plan.microbatch
            expected = [EVALUATION + start + row % size for row in range(first, first + plan.microbatch)]
            if batch.rows.tolist() != expected:
                return f"microbatch {index} of the evaluation has other rows on rank {rank} than its own"
            if _wrong_content(batch, source, rank, min(max(size - first, 0), plan.microbatch)):
                return f"microbatch {index} of the evaluation, on rank {rank}, does not hold the rows that are held out"
    return ""


def _cuts(plan: Plan, step: int) -> int:
    """Return the sequences into which each sample of a step is cut."""
    return plan.sequence_lengths.sequences_per_sample(plan.step_sizes.samples_before(step))


def _counters(plan: Plan, step: int, data_rank: int, number: int) -> list[int]:
    """Return the numbers of a microbatch's sequences; padding repeats the step's first rows."""
    start, size, cuts = plan.step_sizes.samples_before(step), plan.sequences_of(step), _cuts(plan, step)
    first = (number * plan.data_ranks + data_rank) * plan.microbatch
    samples = [start + row % size for row in range(first, first + plan.microbatch)]
    return [sample * cuts + place for sample in samples for place in range(cuts)]


def _real_rows(plan: Plan, step: int, data_rank: int, number: int) -> int:
    first = (number * plan.data_ranks + data_rank) * plan.microbatch
    return min(max(plan.sequences_of(step) - first, 0), plan.microbatch) * _cuts(plan, step)


def _other_length(plan: Plan, ours: Captured) -> Misread | None:
    """Return that a step's samples are cut into too many sequences, or too few."""
    cuts = _cuts(plan, ours.step)
    for rank, batches in enumerate(ours.batches):
        for number, batch in enumerate(batches):
            if len(batch.rows) != cuts * plan.microbatch:
                read = len(batch.rows) / plan.microbatch
                sentence = f"microbatch {number} of rank {rank} has its samples cut in {read:g}, not in {cuts}"
                return Misread("wrong_length", sentence)
    return None


def _shifted(plan: Plan, ours: Captured) -> Misread | None:
    """Return how far all rows of all ranks lie from their places, if equally far."""
    shifts = set()
    for batches, data_rank in zip(ours.batches, ours.data_ranks, strict=True):
        for number, batch in enumerate(batches):
            expected = _counters(plan, ours.step, data_rank, number)
            shifts |= {read - right for read, right in zip(batch.rows.tolist(), expected, strict=True)}
    if shifts == {0} or len(shifts) > 1:
        return None
    shift = next(iter(shifts)) // _cuts(plan, ours.step)
    late = f"{abs(shift)} sample{'s' * (abs(shift) > 1)} {'late' if shift > 0 else 'early'}"
    return Misread("shifted_samples", f"step {ours.step} begins {late}: samples are skipped or come again")


def _wrong_rows(
    plan: Plan, ours: Captured, rank: int, number: int, read: list[int], expected: list[int]
) -> Misread | None:
    if read == expected:
        return None
    for other in range(plan.data_ranks):
        if read == _counters(plan, ours.step, other, number):
            sentence = f"rank {rank} reads the rows of data rank {other}, not those of {ours.data_ranks[rank]}"
            return Misread("equal_rows", sentence)
    return Misread("wrong_rows", f"microbatch {number} of rank {rank} has samples {read}, not {expected}")


def _counted_padding(batch: Batch, real: int) -> Misread | None:
    labels = batch.labels
    has_labels = labels is not None and can_be_ignored(labels) and bool((labels[real:] != NOT_COUNTED).any())
    if not has_labels and not bool(batch.counted[real:].any()):
        return None
    return Misread("counted_padding", "rows that only pad the last microbatch count in the loss")


def _wrong_content(batch: Batch, source: Source, rank: int, real: int, cuts: int = 1) -> Misread | None:
    if not real:
        return None
    counters = (batch.rows[:real:cuts] // cuts).tolist()
    right, read = _columns(shortened(source.rows(counters), cuts)), batch.arguments(range(real))
    read |= {} if batch.labels is None else {"labels": batch.labels[:real]}
    read |= {} if batch.document_ids is None else {"documents": batch.document_ids[:real]}
    for name, values in right.items():
        if name not in read or not torch.equal(read[name].to(values.dtype), values):
            if name == "labels" and name in read and (wrong := _wrong_mask(read[name], values, right, counters)):
                return wrong
            return Misread("wrong_data", f"{name} of samples {counters} on rank {rank} are not those of the corpus")
    return None


def _wrong_mask(read: Tensor, right: Tensor, columns: Mapping[str, Tensor], counters: list[int]) -> Misread | None:
    """Return what is wrong with which positions [R, S] have labels, where each label is the token behind its own."""
    if "input_ids" not in columns:
        return None
    trained, wanted = read != NOT_COUNTED, right != NOT_COUNTED
    is_next = read == columns["input_ids"].roll(-1, dims=1)
    added = int((trained & ~wanted).sum())
    if not added or not bool(is_next[trained].all()):
        return None
    if bool((trained | ~wanted).all()):
        sentence = f"{added} tokens of samples {counters} are trained on that the job leaves out, such as prompts"
        return Misread("trained_prompt", sentence)
    for shift, word in ((-1, "early"), (1, "late")):
        if not bool((trained & ~wanted.roll(shift, dims=1)).any()):
            return Misread("shifted_mask", f"what is trained on of samples {counters} begins and ends a token {word}")
    return None


def _columns(rows: Rows) -> Mapping[str, Tensor]:
    columns = dict(rows.inputs)
    columns |= {} if rows.labels is None else {"labels": rows.labels}
    return columns | ({} if rows.documents is None else {"documents": rows.documents})
