"""Which rank reads which sample: every one once, the same on every layout, padding never counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import torch

from shardwise.data.batch import Batch
from shardwise.data.loader import EVALUATION, Stream
from shardwise.data.order import order
from shardwise.data.state import ConsumedSamples
from shardwise.job.tasks import IGNORED
from shardwise.testing.reference import rows_of


class Numbers:
    """Sample i is [i, i, i]."""

    def __init__(self, size: int, labelled: bool = True) -> None:
        self.size = size
        self.labelled = labelled

    def __len__(self) -> int:
        return self.size

    def batch(self, indices: Sequence[int], counters: Sequence[int], seed: int) -> Batch:
        ids = torch.tensor(indices)[:, None].expand(-1, 3).clone()
        return Batch({"input_ids": ids}, ids.clone() if self.labelled else None, torch.tensor(counters))


def streams(split: Numbers, total: int, microbatch: int, accumulation: int, ranks: int) -> list[Stream]:
    return [Stream(split, 7, total, microbatch, accumulation, ranks, rank) for rank in range(ranks)]


LAYOUTS = [(8, 1, 1), (4, 1, 2), (2, 2, 2), (1, 4, 2), (1, 2, 4), (3, 1, 3), (2, 3, 2), (8, 2, 2)]


@pytest.mark.parametrize(("microbatch", "accumulation", "ranks"), LAYOUTS)
@pytest.mark.parametrize("step", [0, 1, 5])
def test_a_step_holds_the_same_samples_on_every_layout(
    microbatch: int, accumulation: int, ranks: int, step: int
) -> None:
    split = Numbers(13)
    seen: dict[int, int] = {}
    count = 0
    for stream in streams(split, 8, microbatch, accumulation, ranks):
        batches = stream.batches(step)
        assert [len(batch.rows) for batch in batches] == [microbatch] * accumulation
        for batch in batches:
            count += int(batch.count())
            for row, ids, real in zip(batch.rows, batch.inputs["input_ids"], batch.counted, strict=True):
                if real:
                    assert int(row) not in seen
                    seen[int(row)] = int(ids[0])
    assert seen == {counter: order(7, counter, 13) for counter in range(step * 8, step * 8 + 8)}
    assert count == 8 * 3


def test_row_assignment_and_padding() -> None:
    second = Stream(Numbers(100), 7, 9, 2, 3, 2, 1)  # rows 2 3 | 6 7 | 10 11
    batches = second.batches(4)
    assert [batch.rows.tolist() for batch in batches] == [[38, 39], [42, 43], [37, 38]]
    assert [batch.counted.tolist() for batch in batches] == [[True, True], [True, True], [False, False]]
    padding = batches[2]
    assert padding.labels is not None and (padding.labels == IGNORED).all()
    assert padding.inputs["input_ids"][0, 0] == order(7, 37, 100)
    assert padding.count() == 0


def test_samples_without_labels_count_rows() -> None:
    counts = [int(stream.batches(0)[0].count()) for stream in streams(Numbers(20, labelled=False), 3, 2, 1, 2)]
    assert counts == [2, 1]


class Marked(Numbers):
    """Labels of a dtype that has no IGNORED, one of which is what that would wrap to."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(20)
        self.dtype = dtype

    def batch(self, indices: Sequence[int], counters: Sequence[int], seed: int) -> Batch:
        batch = super().batch(indices, counters, seed)
        labels = torch.tensor([0, 1, 156]).to(self.dtype).repeat(len(indices), 1)
        return Batch(batch.inputs, labels, batch.rows)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_labels_that_cannot_be_ignored_count_in_counted_rows(dtype: torch.dtype) -> None:
    batches = [stream.batches(0)[0] for stream in streams(Marked(dtype), 3, 2, 1, 2)]
    assert [int(batch.count()) for batch in batches] == [6, 3]
    assert all(batch.labels is not None and batch.labels[:, 0].eq(0).all() for batch in batches)
    rows = [rows_of(batch) for batch in batches]
    assert [part.count() for part in rows] == [6, 3]


def test_the_state_is_samples_consumed() -> None:
    small, large = Stream(Numbers(50), 7, 4, 4, 1, 1, 0), Stream(Numbers(50), 7, 8, 8, 1, 1, 0)
    after = large.batches_from(12)[0].rows.tolist()
    assert after == [*small.batches(3)[0].rows.tolist(), *small.batches(4)[0].rows.tolist()]


@pytest.mark.parametrize(("microbatch", "accumulation", "ranks"), LAYOUTS)
def test_evaluation_reads_everything_once_in_order(microbatch: int, accumulation: int, ranks: int) -> None:
    validation = Numbers(13)
    real: list[tuple[int, int]] = []
    lengths = set()
    for stream in streams(Numbers(40), 8, microbatch, accumulation, ranks):
        items = list(stream.evaluation(validation))
        lengths.add(len(items))
        for batch in (batch for item in items for batch in item):
            assert batch.count() == 3 * batch.counted.sum()
            pairs = zip(batch.rows.tolist(), batch.inputs["input_ids"][:, 0].tolist(), strict=True)
            real += [pair for pair, counted in zip(pairs, batch.counted.tolist(), strict=True) if counted]
    assert lengths == {2}
    assert sorted(real) == [(EVALUATION + index, index) for index in range(13)]


def test_evaluation_can_be_cut_short() -> None:
    stream = Stream(Numbers(40), 7, 8, 8, 1, 1, 0)
    items = list(stream.evaluation(Numbers(30), batches=2))
    assert [item[0].inputs["input_ids"][:, 0].tolist() for item in items] == [list(range(8)), list(range(8, 16))]
    assert stream.evaluation_batches(Numbers(3), 2) == 1


def test_impossible_streams() -> None:
    with pytest.raises(ValueError, match="sequences_per_step=8"):
        Stream(Numbers(5), 0, 8, 1, 3, 2, 0)
    with pytest.raises(ValueError, match="data_rank=2"):
        Stream(Numbers(5), 0, 2, 1, 1, 2, 2)


def test_a_batch_moves_whole() -> None:
    batch = Stream(Numbers(5), 0, 3, 2, 2, 1, 0).batches(0)[1].to("meta")
    assert batch.labels is not None
    tensors = [batch.inputs["input_ids"], batch.labels, batch.rows, batch.counted]
    assert {tensor.device.type for tensor in tensors} == {"meta"}


def test_the_first_row_of_a_batch_on_a_device_is_known_on_the_host() -> None:
    """Wherever it is brought to once more, as a step does with what a loader has brought already."""
    batch = Stream(Numbers(5), 0, 3, 2, 2, 1, 0).batches(0)[1]
    assert batch.to("meta").to("meta").first_row == int(batch.rows[0])


def test_a_run_of_epochs_reads_each_sample_as_often_and_ends_within_a_step() -> None:
    """Two epochs of 13 samples in steps of 8: 8, 8, 8 and 2, whose other rows are padding."""
    states = [ConsumedSamples(Stream(Numbers(13), 7, 8, 2, 2, 2, rank, total=26)) for rank in range(2)]
    read: list[int] = []
    for real in (8, 8, 8, 2):
        batches = [batch for state in states for batch in state.next_step()]
        assert sum(int(batch.counted.sum()) for batch in batches) == real
        read += [int(ids[0]) for batch in batches for ids in batch.inputs["input_ids"][batch.counted]]
    assert Counter(read) == dict.fromkeys(range(13), 2)
    assert states[0].state_dict() == {"samples": 26}
    with pytest.raises(ValueError, match="no step is left"):
        states[0].next_step()
