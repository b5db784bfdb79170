"""Held-out documents: drawn by their hash, never split between the parts but for one, the same wherever they stand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xxhash

from shardwise.data.order import order
from shardwise.data.packing import Windows, split_windows
from shardwise.data.prepare import prepare
from shardwise.data.split import TokenCorpus, split_tokens
from shardwise.data.store import Column, ColumnWriter
from shardwise.errors import ConfigError
from tests.data.conftest import JobMaker

LENGTHS = [9, 4, 30, 1, 16, 7, 22, 5, 12, 14]


def column(path: Path, values: object, dtype: type) -> Column:
    with ColumnWriter(path, dtype) as writer:
        writer.extend(np.asarray(values, dtype=dtype))
    return Column(path)


def corpus_of(directory: Path, documents: list[np.ndarray]) -> TokenCorpus:
    directory.mkdir(exist_ok=True)
    hashes = [xxhash.xxh3_64_intdigest(document.astype("<i4").tobytes()) for document in documents]
    return TokenCorpus(
        column(directory / "t", np.concatenate(documents), np.int32),
        column(directory / "d", np.cumsum([0, *map(len, documents)])[:-1], np.int64),
        column(directory / "h", hashes, np.uint64),
    )


def documents_of(seed: int = 1, lengths: list[int] = LENGTHS) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.integers(0, 50, length) for length in lengths]


def draw(document: np.ndarray, seed: int) -> int:
    """The definition of data/split.py in Python's own integers."""

    def mix(value: int) -> int:
        value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
        return value ^ (value >> 31)

    return mix(xxhash.xxh3_64_intdigest(document.astype("<i4").tobytes()) ^ mix(seed))


@pytest.mark.parametrize("held_out", [1, 13, 40, 119])
@pytest.mark.parametrize("seed", [0, 7, 2**64 - 1])
def test_documents_are_held_out_as_defined(tmp_path: Path, held_out: int, seed: int) -> None:
    documents = documents_of()
    train, validation = split_tokens(corpus_of(tmp_path / "c", documents), "documents", 0, held_out, seed)
    left = held_out
    kept, gone = list(documents), [np.empty(0, dtype=int) for _ in documents]
    for number in sorted(range(len(documents)), key=lambda number: draw(documents[number], seed)):
        cut = max(0, len(documents[number]) - left)
        kept[number], gone[number] = documents[number][:cut], documents[number][cut:]
        left -= len(gone[number])
    assert train.read(0, len(train)).tolist() == np.concatenate(kept).tolist()
    assert validation.read(0, len(validation)).tolist() == np.concatenate(gone).tolist()
    assert sum(0 < len(part) < len(whole) for part, whole in zip(kept, documents)) <= 1
    for stream, parts in ((train, kept), (validation, gone)):
        lengths = [len(part) for part in parts if len(part)]
        assert stream.document_starts(0, len(stream)).tolist() == np.cumsum([0, *lengths])[:-1].tolist()
        for start, stop in ((0, 1), (len(stream) // 4, len(stream)), (1, 1)):
            assert stream.read(start, stop).tolist() == np.concatenate(parts)[start:stop].tolist()
    with pytest.raises(IndexError):
        train.read(0, len(train) + 1)


def test_a_document_keeps_its_part_wherever_it_stands(tmp_path: Path) -> None:
    documents = documents_of(lengths=[20] * 30)
    held = []
    for name, order_of_documents in (("a", documents), ("b", documents[::-1])):
        _, validation = split_tokens(corpus_of(tmp_path / name, order_of_documents), "documents", 0, 100, 3)
        held.append({tuple(part.tolist()) for part in np.split(validation.read(0, 100), 5)})
    assert held[0] == held[1]
    _, other = split_tokens(corpus_of(tmp_path / "a", documents), "documents", 0, 100, 4)
    assert {tuple(part.tolist()) for part in np.split(other.read(0, 100), 5)} != held[0]


def test_equal_documents_are_held_out_together(tmp_path: Path) -> None:
    documents = [document for document in documents_of(lengths=[10] * 12) for _ in range(2)]
    train, validation = split_tokens(corpus_of(tmp_path / "c", documents), "documents", 0, 60, 0)
    parts = [
        {tuple(part.tolist()) for part in np.split(stream.read(0, len(stream)), len(stream) // 10)}
        for stream in (train, validation)
    ]
    assert not parts[0] & parts[1] and len(parts[1]) == 3


def test_of_one_document_the_end_is_held_out(tmp_path: Path) -> None:
    train, validation = split_tokens(corpus_of(tmp_path / "c", [np.arange(100)]), "documents", 0, 21, 5)
    assert train.read(0, 79).tolist() == list(range(79)) and validation.read(0, 21).tolist() == list(range(79, 100))


def test_windows_of_held_out_documents_come_mixed(tmp_path: Path) -> None:
    """So that an evaluation of a few batches is of all held-out documents; each window comes once."""
    corpus = corpus_of(tmp_path / "c", documents_of(lengths=[40] * 20))
    train, validation = split_windows(corpus, "documents", 5, 0.25, 9, isolate_documents=True)
    assert (len(train), len(validation)) == (120, 39) and train.mixed_by is None
    starts = [validation.start_of(index) for index in range(39)]
    assert starts == [5 * order(9, index, 39) for index in range(39)] != sorted(starts)
    stream = validation.stream
    for index in (0, 20, 38):
        window = stream.read(starts[index], starts[index] + 6)
        begins = stream.document_starts(starts[index] + 1, starts[index] + 6) - starts[index]
        assert validation.window(index).tolist() == window.tolist()
        assert validation.document_numbers(index).tolist() == [int((begins <= at).sum()) for at in range(6)]
    targets = np.concatenate([validation.window(index)[1:] for index in range(4)])
    counts = validation.target_counts(4)
    assert counts.tolist() == np.bincount(targets, minlength=len(counts)).tolist()
    assert validation.target_counts().sum() == 39 * 5


def test_a_job_chooses_the_split(make_job: JobMaker, token_file: Path) -> None:
    data = prepare(make_job(path=str(token_file), format="tokens"), 401)
    again = prepare(make_job(path=str(token_file), format="tokens", validation_split="place"), 401)
    assert (data.split, again.split, data.content) == ("documents", "place", again.content)
    assert isinstance(again.train, Windows) and isinstance(data.train, Windows)
    assert again.train.window(1).tolist() == list(range(17, 34))
    assert len(again.train) == len(data.train) and len(again.validation) == len(data.validation)
    last = [int(again.validation.batch([index], [0], 0).inputs["input_ids"].min()) for index in range(3)]
    assert last == sorted(last) and min(last) > max(again.train.window(len(again.train) - 1).tolist()) - 1


def test_a_factory_keeps_its_rows_where_they_are(make_job: JobMaker) -> None:
    factory = "tests.data.test_prepare:Squares"
    assert prepare(make_job(factory=factory)).split == "place"
    with pytest.raises(ConfigError, match=r"data\.validation_split=documents has no meaning with data\.factory"):
        prepare(make_job(factory=factory, validation_split="documents"))
