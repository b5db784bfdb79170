"""Packing of whole rows: first fit, labels, isolation, padding, counts and the split, against the definitions."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from shardwise.data.corpus import with_format
from shardwise.data.packed_rows import PackedRows, first_fit
from shardwise.data.prepare import prepare
from shardwise.data.token_data import TokenData
from shardwise.errors import DataError
from tests.data.chats import CHATS, as_messages, chat_job

ROWS = [{"messages": as_messages(turns)} for turns in CHATS] * 3


def rows_of(tmp_path: Path, rows: list[dict[str, Any]] = ROWS, **data: Any) -> tuple[TokenData, PackedRows, PackedRows]:
    prepared = prepare(with_format(chat_job(tmp_path, rows, **data)))
    assert isinstance(prepared.train, PackedRows) and isinstance(prepared.validation, PackedRows)
    return prepared, prepared.train, prepared.validation


def test_answers(tmp_path: Path) -> None:
    data, train, _ = rows_of(tmp_path, [{"messages": as_messages(CHATS[1])}] * 3, sequence_length=128)
    tokenizer = AutoTokenizer.from_pretrained(str(data.tokenizer_directory))
    for prompt, answer in train.answers(2):
        assert tokenizer.decode(prompt) == "[system]Be brief.<|end|>[user]1+1?<|end|>[assistant]"
        assert tokenizer.decode(answer) == "2<|end|>"


def test_answers_that_are_cut_are_not_asked_for(tmp_path: Path) -> None:
    long = [{"messages": as_messages([("user", "1+1?"), ("assistant", f"{number} is what it comes to")])}
            for number in range(3)]  # fmt: skip
    short = [{"messages": as_messages([("user", f"{number}?"), ("assistant", "no")])} for number in range(3)]
    _, whole, _ = rows_of(tmp_path, long)
    prompt, answer = whole.answers(1)[0]
    cut = {"sequence_length": len(prompt) + len(answer) - 3, "truncation": True}
    (tmp_path / "mixed").mkdir()
    data, train, _ = rows_of(tmp_path / "mixed", long + short, **cut)
    tokenizer = AutoTokenizer.from_pretrained(str(data.tokenizer_directory))
    answers = [tokenizer.decode(said) for _, said in train.answers(6)]
    assert 0 < len(answers) < len(train.rows) and set(answers) == {"no<|end|>"}
    (tmp_path / "none").mkdir()
    _, train, _ = rows_of(tmp_path / "none", long, **cut)
    with pytest.raises(DataError, match=r"held-out rows is cut to data\.sequence_length=.* ahead of its first answer"):
        train.answers(2)


def test_first_fit() -> None:
    lengths = [5, 7, 5, 2, 4, 2, 5, 1, 6]
    bins, rooms = [], []
    for number, length in enumerate(lengths):  # the definition
        place = next((place for place, room in enumerate(rooms) if room >= length), len(rooms))
        if place == len(rooms):
            bins.append([])
            rooms.append(10)
        bins[place].append(number)
        rooms[place] -= length
    assert first_fit(lengths, 10) == bins
    assert first_fit([10], 10) == [[0]] and first_fit([], 10) == []


def test_rows_stand_whole_with_labels_positions_and_documents_of_their_own(tmp_path: Path) -> None:
    data, train, validation = rows_of(tmp_path)
    assert data.row_counts is not None
    assert (data.row_counts.rows, data.row_counts.too_long) == (18, 6)  # the second and the fourth are longer than 64
    assert len(validation.rows) == 2 and sorted([*train.rows, *validation.rows]) == [
        i for i in range(18) if i % 6 not in (1, 3)
    ]
    batch = train.batch(range(len(train)), range(len(train)), 0)
    assert batch.labels is not None and batch.document_ids is not None
    used = 0
    for sequence, rows in enumerate(train.sequences):
        end = 0
        for document, row in enumerate(rows):
            ids, labels = train.row(row)
            part = slice(end, end + len(ids))
            assert batch.inputs["input_ids"][sequence, part].tolist() == ids.tolist()
            assert batch.labels[sequence, part].tolist() == labels.tolist()
            assert batch.inputs["position_ids"][sequence, part].tolist() == list(range(len(ids)))
            assert set(batch.document_ids[sequence, part].tolist()) == {document}
            end = part.stop
        assert (batch.labels[sequence, end:] == -100).all()
        assert (batch.document_ids[sequence, end:] == len(rows)).all()
        used += end
    assert train.padding == len(train) * 64 - used
    assert all((labels != -100).sum() > 0 for labels in batch.labels)
    again = pickle.loads(pickle.dumps(train))
    assert torch.equal(again.batch([0], [0], 0).labels, batch.labels[:1])


def test_unpacked_rows_have_padding_behind_them_and_no_mask(tmp_path: Path) -> None:
    _, train, _ = rows_of(tmp_path, packing=False)
    assert len(train) == len(train.rows)
    batch = train.batch([0], [5], 0)
    ids, labels = train.row(int(train.rows[0]))
    assert list(batch.inputs) == ["input_ids"] and batch.document_ids is None and batch.labels is not None
    assert batch.inputs["input_ids"][0, : len(ids)].tolist() == ids.tolist()
    assert batch.labels[0].tolist() == [*labels.tolist(), *[-100] * (64 - len(ids))]


def test_long_rows_and_rows_without_a_target_are_counted(tmp_path: Path) -> None:
    silent = {"messages": as_messages([("user", "Hello?")])}
    data, *_ = rows_of(tmp_path, [*ROWS, silent])
    assert data.row_counts is not None and data.row_counts.without_target == 1
    assert data.notes()[0].startswith("1 of 19 rows have no token")
    assert "6 of 19 rows are longer than data.sequence_length=64 and are left out" in data.notes()[1]
    (tmp_path / "cut").mkdir()
    cut, train, _ = rows_of(tmp_path / "cut", truncation=True)
    assert cut.row_counts is not None
    # The fourth's answer lies behind the cut: it is left out; the second's first answer does not.
    assert cut.row_counts == (18, 3, 0, 3)
    assert max(len(train.row(int(row))[0]) for row in train.rows) == 64


def test_the_split_is_one_of_the_seed(tmp_path: Path) -> None:
    _, train, validation = rows_of(tmp_path, validation_split="place")
    assert sorted(validation.rows) == [16, 17] and max(train.rows) == 14
    few = [ROWS[0], {"messages": as_messages([("user", "Hello?")])}]
    (tmp_path / "few").mkdir()
    with pytest.raises(DataError, match=r"1 of 2 rows are left.*1 have no token that is trained on"):
        rows_of(tmp_path / "few", few)


def test_a_mask_that_is_empty_for_all_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none of 2 rows has a token that is trained on.*generation"):
        rows_of(tmp_path, [{"messages": as_messages([("user", "Hello?")])}] * 2)


def test_the_prompt_of_a_sample_ends_where_the_answer_begins(tmp_path: Path) -> None:
    _, _, validation = rows_of(tmp_path)
    ids, labels = validation.row(int(validation.rows[0]))
    prompt = validation.prompt(64)
    assert prompt == ids[: len(prompt)].tolist() and labels[len(prompt) - 1] == ids[len(prompt)]
    assert (labels[: len(prompt) - 1] == -100).all()


def test_every_sample_with_a_target_has_the_weight_of_one(tmp_path: Path) -> None:
    _, train, _ = rows_of(tmp_path)
    batch = train.batch([0, 1], [0, 1], 0).with_sample_weights()
    assert batch.labels is not None and batch.weights is not None and batch.document_ids is not None
    assert round(float(batch.count())) == sum(len(rows) for rows in train.sequences[:2])
    first = (batch.document_ids[0] == 0) & (batch.labels[0] != -100)
    assert batch.weights[0][first].tolist() == [1 / int(first.sum())] * int(first.sum())
    assert not batch.weights[batch.labels == -100].any()
    batch.labels[1] = -100  # a padding row
    assert round(float(batch.with_sample_weights().count())) == len(train.sequences[0])


def pairs_of(tmp_path: Path, lengths: list[tuple[int, int]], **data: Any) -> tuple[TokenData, PackedRows, PackedRows]:
    """Prepare pairs whose answers are texts of these lengths; a prompt of 3 bytes is before, the end behind them."""
    tmp_path.mkdir(exist_ok=True)
    rows = [{"prompt": "2+2", "chosen": "a" * n, "rejected": "b" * m} for n, m in lengths]
    return rows_of(tmp_path, rows, **data)


def test_pairs_stand_together_chosen_first(tmp_path: Path) -> None:
    lengths = [(3, 5), (10, 2), (20, 20), (4, 4), (2, 9), (60, 2)]
    data, train, validation = pairs_of(tmp_path, lengths, sequence_length=64)
    assert data.row_counts == (6, 0, 1, 0) and data.documents == 6  # the last is longer than 64
    assert len(validation.rows) == 1 and sorted([*train.rows, *validation.rows]) == [0, 2, 4, 6, 8]
    assert data.entropy_of(None) is None and "1 of 6 rows are longer" in data.notes()[0]
    batch = train.batch(range(len(train)), range(len(train)), 0)
    assert batch.labels is not None and batch.completions is not None and batch.document_ids is not None
    assert torch.equal(batch.completions, batch.document_ids)
    for sequence, rows in enumerate(train.sequences):
        for answer, row in enumerate(rows):
            place = batch.completions[sequence] == answer
            assert rows[answer - answer % 2] + answer % 2 == row
            assert batch.inputs["position_ids"][sequence, place].tolist() == list(range(int(place.sum())))
            n, m = lengths[row // 2]
            assert int((batch.labels[sequence, place] != -100).sum()) == (m if row % 2 else n) + 1  # and the end
    weighted = batch.with_sample_weights()
    assert round(float(weighted.count())) == len(train.rows)


def test_a_pair_is_cut_to_what_a_sequence_holds_of_both(tmp_path: Path) -> None:
    lengths = [(30, 30), (30, 4), (4, 4), (4, 30)]
    data, train, _ = pairs_of(tmp_path, lengths, sequence_length=32, truncation=True, packing=False)
    assert data.row_counts == (4, 0, 0, 3) and len(train) == 3
    expected = {0: (16, 16), 2: (24, 8), 4: (8, 8), 6: (8, 24)}
    for first in train.rows:
        assert tuple(len(train.row(int(first) + side)[0]) for side in (0, 1)) == expected[int(first)]


def test_a_pair_that_is_equal_up_to_the_cut_is_left_out(tmp_path: Path) -> None:
    rows = [{"prompt": "2+2", "chosen": "a" * 30 + n, "rejected": "a" * 30 + "b"} for n in "cde"]
    rows += [{"prompt": "2+2", "chosen": "4", "rejected": f"{n}"} for n in (5, 6)]
    data, train, validation = rows_of(tmp_path, rows, sequence_length=32, truncation=True)
    assert data.row_counts == (5, 3, 0, 0) and sorted([*train.rows, *validation.rows]) == [6, 8]
    assert "3 of 5 rows have no token that is trained on, or none that tells chosen from rejected" in data.notes()[0]


def test_a_pair_of_equal_tokens_is_refused(tmp_path: Path) -> None:
    prompt, answer = [{"role": "user", "content": "2+2"}], {"role": "assistant", "content": "4"}
    rows = [{"prompt": prompt, "chosen": [answer], "rejected": [{"from": "gpt", "value": "4"}]}]
    with pytest.raises(DataError, match=r"line 1: chosen and rejected have the same tokens, .*; remove the row"):
        rows_of(tmp_path, rows, train_on="completion")


def test_completions_have_the_log_probabilities_that_are_known_of_them(tmp_path: Path) -> None:
    _, train, validation = pairs_of(tmp_path, [(2, 3), (3, 2), (4, 1), (2, 2)])
    assert train.batch([0], [0], 0).reference is None
    values = -np.arange(8, dtype=np.float64)
    for split in (train, validation):
        known = replace(split, reference=values)
        for index, rows in enumerate(split.sequences):
            batch = known.batch([index], [index], 0)
            assert batch.reference is not None and batch.completions is not None
            assert batch.reference[0, : len(rows)].tolist() == values[rows].tolist()
            assert not batch.reference[0, len(rows) :].any() and batch.completions.max() < batch.reference.shape[1]
