"""Windows, split, document borders and masking, against the definitions written out."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from shardwise.data import store
from shardwise.data.packing import Masking, Spans, Windows, entropy, leave_out, mask, split_windows
from shardwise.data.split import TokenCorpus
from shardwise.data.store import Column, ColumnWriter
from shardwise.errors import DataError
from shardwise.job.tasks import IGNORED

MASKING = Masking(probability=0.15, mask_id=2, vocabulary_size=50, special_ids=(0, 1, 2))


def column(path: Path, values: np.ndarray | list[int], dtype: type = np.int64) -> Column:
    with ColumnWriter(path, dtype) as writer:
        for part in np.array_split(np.asarray(values), 7):
            writer.extend(part)
    return Column(path)


def split(tmp_path: Path, tokens: int, size: int, fraction: float = 0.2, **options: object) -> tuple[Windows, Windows]:
    documents = options.pop("documents", [0, 5, 9, 30, 31, 70])
    corpus = TokenCorpus(
        column(tmp_path / "t", np.arange(tokens)),
        column(tmp_path / "d", documents),
        column(tmp_path / "h", np.arange(len(documents)), np.uint64),
    )
    return split_windows(corpus, "place", size, fraction, 0, **options)


@pytest.mark.parametrize("tokens", [98, 99, 100, 101, 107])
@pytest.mark.parametrize("masked", [False, True])
def test_windows_follow_the_definition(tmp_path: Path, tokens: int, masked: bool) -> None:
    size, extra = 7, 0 if masked else 1
    train, validation = split(tmp_path, tokens, size, masking=MASKING if masked else None)
    count = (tokens - 2 * extra) // size
    kept = max(1, int(count * 0.2))
    assert (len(train), len(validation)) == (count - kept, kept)
    base = (count - kept) * size + extra
    for index in range(len(train)):
        assert train.window(index).tolist() == list(range(index * size, index * size + size + extra))
    for index in range(len(validation)):
        start = base + index * size
        assert validation.window(index).tolist() == list(range(start, start + size + extra))
    used = [{t for i in range(len(part)) for t in part.window(i).tolist()} for part in (train, validation)]
    assert not used[0] & used[1]
    assert max(used[1]) < tokens


def test_causal_labels_are_the_next_tokens(tmp_path: Path) -> None:
    train, _ = split(tmp_path, 100, 7)
    batch = train.batch([3, 0], [11, 12], seed=0)
    assert batch.inputs["input_ids"].tolist() == [list(range(21, 28)), list(range(7))]
    assert batch.labels is not None
    assert batch.labels.tolist() == [list(range(22, 29)), list(range(1, 8))]
    assert batch.rows.tolist() == [11, 12]
    assert batch.document_ids is None and list(batch.inputs) == ["input_ids"]
    assert batch.count() == 14 and batch.counted.all()


@pytest.mark.parametrize("isolated", [False, True])
def test_samples_that_are_cut_are_windows_of_that_length(tmp_path: Path, isolated: bool) -> None:
    whole, _ = split(tmp_path, 100, 12, isolate_documents=isolated, documents=[0, 3, 4, 8, 16, 17, 31, 38, 90])
    short = Windows(whole.stream, 3 * len(whole), 4, isolate_documents=isolated)
    numbers = [3, 0, 5]
    parts = [3 * number + place for number in numbers for place in range(3)]
    cut, right = whole.batch(numbers, [7, 8, 9], seed=0).cut(3), short.batch(parts, list(range(21, 30)), seed=0)
    assert cut.sequences_per_sample == 3 and cut.inputs.keys() == right.inputs.keys()
    pairs = [(cut.inputs[name], right.inputs[name]) for name in right.inputs]
    pairs += [(cut.labels, right.labels), (cut.rows, right.rows), (cut.counted, right.counted)]
    pairs += [(cut.document_ids, right.document_ids)] if isolated else []
    assert all(own is not None and torch.equal(own, other) for own, other in pairs)


def test_isolated_documents(tmp_path: Path) -> None:
    train, _ = split(tmp_path, 100, 8, isolate_documents=True, documents=[0, 5, 9, 16, 17, 31, 90])
    batch = train.batch([0, 1, 2, 3], [0, 1, 2, 3], seed=0)
    assert batch.document_ids is not None and batch.labels is not None
    assert batch.document_ids.tolist()[:3] == [
        [0, 0, 0, 0, 0, 1, 1, 1],
        [0, 1, 1, 1, 1, 1, 1, 1],
        [0, 1, 1, 1, 1, 1, 1, 1],
    ]
    assert batch.inputs["position_ids"].tolist()[:3] == [
        [0, 1, 2, 3, 4, 0, 1, 2],
        [0, 0, 1, 2, 3, 4, 5, 6],
        [0, 0, 1, 2, 3, 4, 5, 6],
    ]
    assert batch.labels[0].tolist() == [1, 2, 3, 4, IGNORED, 6, 7, 8]
    assert batch.labels[1].tolist() == [IGNORED, 10, 11, 12, 13, 14, 15, IGNORED]  # 16 starts a document
    assert batch.document_ids[3].tolist() == [0, 0, 0, 0, 0, 0, 0, 1]


def test_isolated_documents_of_a_masked_lm_keep_their_labels(tmp_path: Path) -> None:
    options = {"documents": [0, 5, 9], "masking": Masking(0.999999, 2, 50, ())}
    train, _ = split(tmp_path, 100, 8, isolate_documents=True, **options)
    batch = train.batch([0], [0], seed=0)
    assert batch.document_ids is not None and batch.labels is not None
    assert batch.document_ids.tolist() == [[0, 0, 0, 0, 0, 1, 1, 1]]
    assert batch.labels.tolist() == [list(range(8))]


def test_windows_across_record_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "ROWS", 10)
    train, validation = split(tmp_path, 107, 20)
    tokens = train.stream.corpus.tokens
    assert len(tokens._chunks) > 5
    assert train.window(1).tolist() == list(range(20, 41))
    assert [tokens[index] for index in range(107)] == list(range(107))
    assert validation.window(0).tolist() == list(range(81, 102))
    with pytest.raises(IndexError):
        tokens.read(100, 108)


def test_too_few_tokens(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has 100 tokens: too few .* data.sequence_length=50; .* at most 49"):
        split(tmp_path, 100, 50)
    assert [len(part) for part in split(tmp_path, 100, 49)] == [1, 1]


def test_masking_is_a_function_of_seed_and_counter() -> None:
    tokens = np.arange(3, 43)
    inputs, labels = mask(tokens, MASKING, 1, 5)
    assert np.array_equal(inputs, mask(tokens, MASKING, 1, 5)[0])
    assert not np.array_equal(labels, mask(tokens, MASKING, 1, 6)[1])
    assert not np.array_equal(labels, mask(tokens, MASKING, 2, 5)[1])
    assert np.array_equal(inputs[labels == IGNORED], tokens[labels == IGNORED])
    assert np.array_equal(labels[labels != IGNORED], tokens[labels != IGNORED])
    assert np.flatnonzero(labels != IGNORED).tolist() == [8, 13, 19, 21, 32, 33]  # never changes


def test_masking_follows_its_definition() -> None:
    tokens = [0, 1, 2, *range(3, 50)] * 4
    draws = [int(raw) for raw in np.random.Philox(key=np.array([9, 1 << 62], dtype=np.uint64)).random_raw(600)]
    inputs, labels = list(tokens), [IGNORED] * 200
    for t, token in enumerate(tokens):
        if token > 2 and draws[t] < 0.15 * 2**64:
            labels[t] = token
            kind = draws[200 + t] % 10
            inputs[t] = 2 if kind < 8 else draws[400 + t] % 50 if kind == 8 else token
    found = mask(np.array(tokens), MASKING, 9, 1 << 62)
    assert (found[0].tolist(), found[1].tolist()) == (inputs, labels)


def test_masking_shares() -> None:
    tokens = np.resize(np.arange(50), 100_000)
    inputs, labels = mask(tokens, MASKING, 0, 0)
    chosen = labels != IGNORED
    ordinary = tokens > 2
    assert not chosen[~ordinary].any()
    assert abs(chosen[ordinary].mean() - 0.15) < 0.005
    assert abs((inputs[chosen] == 2).mean() - 0.8 - 0.1 / 50) < 0.01
    assert abs((inputs[chosen] == tokens[chosen]).mean() - 0.1 - 0.1 / 50) < 0.01
    assert set(range(50)) == set(inputs[chosen].tolist())


def test_target_counts_and_entropy(tmp_path: Path) -> None:
    train, validation = split(tmp_path, 100, 7)
    targets = [token for index in range(len(validation)) for token in validation.window(index)[1:]]
    assert np.flatnonzero(validation.target_counts()).tolist() == targets
    assert np.flatnonzero(validation.target_counts(1)).tolist() == validation.window(0)[1:].tolist()
    assert entropy(np.array([2, 0, 2])) == pytest.approx(np.log(2))
    assert entropy(np.array([5])) == 0.0
    assert train.target_counts().sum() == 7 * len(train)


def test_target_counts_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, _ = split(tmp_path, 100, 7)
    whole = train.target_counts()
    monkeypatch.setattr("shardwise.data.packing.COUNT_BLOCK", 10)
    assert np.array_equal(whole, train.target_counts())


def test_neighbouring_windows_share_only_the_border(tmp_path: Path) -> None:
    train, _ = split(tmp_path, 100, 7)
    windows = [train.window(index) for index in range(len(train))]
    assert all(one[-1] == two[0] for one, two in pairwise(windows))


@pytest.mark.parametrize("length, probability, mean", [(2, 0.15, 3.0), (20, 0.15, 2.0), (64, 0.5, 2.0), (31, 0.9, 3.0)])
def test_spans_and_the_rest_make_up_the_window(length: int, probability: float, mean: float) -> None:
    """All samples of a length have equal shapes, and no two the same spans."""
    spans = Spans(probability, mean, tuple(range(1000, 1100)), eos_id=7)
    left_out, count = spans.counts(length)
    window, found = np.arange(100, 100 + length), set()
    for counter in range(20):
        inputs, labels = leave_out(window, spans, 3, counter)
        assert (len(inputs), len(labels)) == (length - left_out + count + 1, left_out + count + 1)
        assert inputs[-1] == labels[-1] == 7
        kept, gone = (np.split(part[:-1], np.flatnonzero(part >= 1000)) for part in (inputs, labels))
        assert [piece[0] for piece in gone[1:]] == list(spans.sentinel_ids[:count]) and all(
            len(p) > 1 for p in gone[1:]
        )
        kept = [kept[0], *(piece[1:] for piece in kept[1:-1])]
        assert all(len(piece) for piece in kept)
        rebuilt = [part for pair in zip(kept, (piece[1:] for piece in gone[1:]), strict=True) for part in pair]
        assert np.concatenate(rebuilt).tolist() == window.tolist()
        found.add(tuple(inputs.tolist()))
    assert len(found) > (1 if count > 1 else 0)
    assert all(np.array_equal(a, b) for a, b in zip(leave_out(window, spans, 3, 5), leave_out(window, spans, 3, 5)))
