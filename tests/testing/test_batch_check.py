"""Microbatches against the corpus: whose rows, which samples, and what they hold, on two ranks of made-up rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.data.batch import Batch
from shardwise.plan.sequence_lengths import LengthStage, SequenceLengths
from shardwise.plan.step_sizes import SizeStage, StepSizes
from shardwise.testing.batch_check import find_misread
from shardwise.testing.oracle_data import NOT_COUNTED, Rows
from tests.testing.made_evidence import captured, made_plan

SIZE, LENGTH = 7, 3  # rows of a step, of which the last microbatch repeats one; tokens of each


def tokens(counters: list[int]) -> Tensor:
    return torch.tensor([[10 * counter + place for place in range(LENGTH)] for counter in counters])


class Corpus:
    """Samples whose tokens say which they are."""

    def rows(self, counters: Any) -> Rows:
        ids = tokens(list(counters))
        return Rows({"input_ids": ids}, ids + 1, list(counters), documents=torch.zeros_like(ids))


def batch(counters: list[int], real: int = 2) -> Batch:
    ids = tokens(counters)
    labels = (ids + 1).masked_fill(torch.arange(len(counters)).unsqueeze(1) >= real, NOT_COUNTED)
    counted = torch.arange(len(counters)) < real
    return Batch({"input_ids": ids}, labels, torch.tensor(counters), torch.zeros_like(ids), counted=counted)


def fed(*rows: list[list[int]], data_ranks: tuple[int, ...] = (0, 1)) -> Any:
    """Return a step of two microbatches of two rows on each rank; the 8th row of the step is padding."""
    batches = [[batch(own, 1 if own == [13, 7] else 2) for own in of_rank] for of_rank in rows]
    return captured(step=1, batches=batches, data_ranks=list(data_ranks))


RIGHT = ([[7, 8], [11, 12]], [[9, 10], [13, 7]])


def misread(ours: Any, lengths: SequenceLengths | None = None) -> Any:
    plan = made_plan()
    plan.microbatch, plan.sequences_per_step, plan.sequences_of = 2, SIZE, lambda step: SIZE
    plan.step_sizes = StepSizes((SizeStage(SIZE),))
    plan.sequence_lengths = lengths or plan.sequence_lengths
    return find_misread(plan, Corpus(), ours)


def test_right_rows_are_found_right() -> None:
    assert misread(fed(*RIGHT)) is None


@pytest.mark.parametrize(
    ("rows", "fault", "words"),
    [
        (
            ([[9, 10], [13, 7]], [[9, 10], [13, 7]]),
            "equal_rows",
            "reads the rows of data rank 1, not those of 0",
        ),
        (
            ([[7, 9], [11, 12]], [[9, 10], [13, 7]]),
            "wrong_rows",
            "microbatch 0 of rank 0 has samples [7, 9], not",
        ),
        (([[9, 10], [13, 14]], [[11, 12], [15, 9]]), "shifted_samples", "step 1 begins 2 samples late"),
        (([[6, 7], [10, 11]], [[8, 9], [12, 6]]), "shifted_samples", "step 1 begins 1 sample early"),
    ],
)
def test_rows_in_the_wrong_places_are_named(rows: Any, fault: str, words: str) -> None:
    assert (found := misread(fed(*rows))) is not None
    assert found.fault == fault and words in found.sentence


def test_samples_that_are_cut_are_judged_as_sequences() -> None:
    """The second step has sequences of one token of three."""
    lengths, ours = SequenceLengths((LengthStage(3), LengthStage(1, 6), LengthStage(3, 8))), fed(*RIGHT)
    found = misread(ours, lengths)
    assert found.fault == "wrong_length" and "has its samples cut in 1, not in 3" in found.sentence
    for batches in ours.batches:
        for number, whole in enumerate(batches):
            positions = torch.arange(3).expand(2, 3)
            batches[number] = replace(whole, inputs={**whole.inputs, "position_ids": positions}).cut(3)
    assert misread(ours, lengths) is None
    ours.batches[1][0].inputs["input_ids"][4] += 1
    found = misread(ours, lengths)
    assert found.fault == "wrong_data" and "input_ids of samples [9, 10] on rank 1" in found.sentence
    ours.batches = [[replace(batch, rows=batch.rows + 3) for batch in batches] for batches in ours.batches]
    assert "begins 1 sample late" in misread(ours, lengths).sentence


class Answers(Corpus):
    """The same samples, of which the label in the middle alone is trained on."""

    def rows(self, counters: Any) -> Rows:
        rows = super().rows(counters)
        labels = tokens(list(counters)).roll(-1, dims=1)
        labels[:, [0, 2]] = NOT_COUNTED
        return Rows(rows.inputs, labels, rows.counters, documents=rows.documents)


@pytest.mark.parametrize(
    ("trained", "fault", "words"),
    [
        ([True, True, False], "trained_prompt", "2 tokens of samples [7, 8] are trained on that the job leaves out"),
        ([True, False, False], "shifted_mask", "of samples [7, 8] begins and ends a token early"),
        ([False, False, True], "wrong_data", "labels of samples [7, 8] on rank 0 are not those of the corpus"),
    ],
)
def test_a_mask_that_is_wrong_is_named(trained: list[bool], fault: str, words: str) -> None:
    """The last has a label that is not the token behind its own."""
    following = tokens([7, 8]).roll(-1, dims=1)
    labels = torch.where(torch.tensor(trained), following, NOT_COUNTED)
    labels[:, 2] = torch.where(labels[:, 2] != NOT_COUNTED, 5, NOT_COUNTED)
    plan = made_plan()
    plan.microbatch, plan.sequences_per_step, plan.sequences_of = 2, SIZE, lambda step: SIZE
    plan.step_sizes = StepSizes((SizeStage(SIZE),))
    ours = fed(*RIGHT)
    ours.batches[0][0] = replace(ours.batches[0][0], labels=labels)
    found = find_misread(plan, Answers(), ours)
    assert found is not None and found.fault == fault and words in found.sentence


def changed(rank: int, number: int, **changes: Any) -> Any:
    ours = fed(*RIGHT)
    ours.batches[rank][number] = replace(ours.batches[rank][number], **changes)
    return misread(ours)


def test_padding_that_counts_is_named() -> None:
    for changes in ({"counted": torch.tensor([True, True])}, {"labels": tokens([13, 7]) + 1}):
        found = changed(1, 1, **changes)
        assert found is not None and found.fault == "counted_padding", changes


def test_content_of_other_samples_is_named() -> None:
    for name, changes in {
        "input_ids": {"inputs": {"input_ids": tokens([7, 9])}},
        "labels": {"labels": tokens([7, 8])},
        "documents": {"document_ids": None},
    }.items():
        found = changed(0, 0, **changes)
        assert found is not None and found.fault == "wrong_data"
        assert found.sentence == f"{name} of samples [7, 8] on rank 0 are not those of the corpus"
