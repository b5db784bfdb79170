"""From files to batches, against a reader of the same files in a few lines; the cache; data sets of one's own."""

from __future__ import annotations

import json
import pickle
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from shardwise.data.loader import Stream
from shardwise.data.order import order
from shardwise.data.packing import Windows
from shardwise.data.prepare import prepare
from shardwise.data.store import COMPLETE, build_once
from shardwise.errors import ConfigError, DataError
from tests.data.conftest import TEXTS, JobMaker

HERE = __name__


def test_batches_equal_a_plain_reader(text_directory: Path, make_job: JobMaker) -> None:
    data = prepare(make_job(path=str(text_directory), validation_split="place"), 300)
    tokenizer = AutoTokenizer.from_pretrained(data.tokenizer_directory)
    stream: list[int] = []
    for text in TEXTS:
        stream += [*tokenizer(text).input_ids, tokenizer.eos_token_id]
    assert isinstance(data.train, Windows)
    starts = [data.train.stream.corpus.documents[number] for number in range(4)]
    assert starts == [0, *(index + 1 for index, token in enumerate(stream[:-1]) if token == tokenizer.eos_token_id)]
    count = (len(stream) - 2) // 16
    training = count - max(1, int(count * 0.2))
    assert (data.tokens, data.documents, data.eos_id) == (len(stream), 4, 0)
    assert len(data.train) == training
    batch = Stream(data.train, 5, 4, 4, 1, 1, 0).batches(2)[0]
    starts = [order(5, counter, training) * 16 for counter in range(8, 12)]
    assert batch.inputs["input_ids"].tolist() == [stream[start : start + 16] for start in starts]
    assert batch.labels is not None
    assert batch.labels.tolist() == [stream[start + 1 : start + 17] for start in starts]
    targets = stream[training * 16 + 2 : count * 16 + 2]
    shares = np.unique(targets, return_counts=True)[1] / len(targets)
    assert data.unigram_entropy == pytest.approx(-(shares * np.log(shares)).sum())


def test_masked_lm(text_directory: Path, make_job: JobMaker) -> None:
    data = prepare(make_job(task="masked_lm", path=str(text_directory)), 300)
    ranks = [Stream(data.train, 5, 8, 2, 2, 2, rank) for rank in range(2)]
    whole = Stream(data.train, 5, 8, 8, 1, 1, 0).batches(1)[0]
    parts = {int(b.rows[j]): b.inputs["input_ids"][j] for r in ranks for b in r.batches(1) for j in range(2)}
    assert torch.equal(whole.inputs["input_ids"], torch.stack([parts[int(row)] for row in whole.rows]))
    assert 0 < whole.count() < 8 * 16 / 2


def test_the_cache_is_used_and_follows_the_files(text_directory: Path, make_job: JobMaker) -> None:
    job = make_job(path=str(text_directory))
    said: list[str] = []
    first = prepare(job, 300, said.append)
    assert any("tokenizing" in line for line in said)
    said.clear()
    assert prepare(job, 300, said.append).describe() == first.describe()
    assert len(said) == 1 and "cached" in said[0]
    (text_directory / "1.txt").write_text("all new " * 60)
    changed = prepare(job, 300, said.append)
    assert changed.content != first.content and changed.directory != first.directory


def test_another_cache_holds_the_same_content(text_directory: Path, make_job: JobMaker, tmp_path: Path) -> None:
    first = prepare(make_job(path=str(text_directory)))
    second = prepare(make_job(path=str(text_directory), cache_directory=str(tmp_path / "other")))
    assert first.directory != second.directory
    assert first.content == second.content


def test_data_pickles_as_paths(text_directory: Path, make_job: JobMaker) -> None:
    data = prepare(make_job(path=str(text_directory)))
    packed = pickle.dumps(data)
    again = pickle.loads(packed)
    assert len(packed) < 5000
    assert again.describe() == data.describe()
    assert isinstance(again.train, Windows) and isinstance(data.train, Windows)
    assert np.array_equal(again.train.window(3), data.train.window(3))


def test_prompt_is_the_start_of_a_validation_text(make_job: JobMaker, token_file: Path) -> None:
    data = prepare(make_job(path=str(token_file), format="tokens"), 401)
    assert isinstance(data.validation, Windows)
    prompt = data.prompt(5)
    documents = data.validation.stream.corpus.documents
    assert prompt == list(range(prompt[0], prompt[0] + 5))
    assert prompt[0] - 1 in [documents[index] for index in range(data.documents)]
    assert set(prompt) <= set(data.validation.stream.read(0, len(data.validation.stream)).tolist())


def test_tokens_without_tokenizer(make_job: JobMaker, token_file: Path) -> None:
    data = prepare(make_job(path=str(token_file), format="tokens", validation_split="place"))
    assert (data.tokens, data.vocabulary_size, data.eos_id, data.tokenizer_directory) == (400, 401, None, None)
    assert data.train.batch([1], [0], 0).inputs["input_ids"].tolist() == [list(range(17, 33))]
    with pytest.raises(DataError, match="hold 400, the vocabulary has 400 tokens"):
        prepare(make_job(path=str(token_file), format="tokens"), 400)
    with pytest.raises(DataError, match="masked_lm needs a mask token"):
        prepare(make_job(task="masked_lm", path=str(token_file), format="tokens"))


def test_tokens_with_tokenizer_end_with_its_end(make_job: JobMaker, text_directory: Path, tmp_path: Path) -> None:
    tokenizer = prepare(make_job(path=str(text_directory))).tokenizer_directory
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in [[5] * 20, [6] * 20 + [0], [7] * 20]))
    data = prepare(make_job(path=str(path), format="tokens", tokenizer=tokenizer))
    assert isinstance(data.train, Windows)
    tokens = data.train.stream.corpus.tokens.read(0, data.tokens).tolist()
    assert tokens == [5] * 20 + [0] + [6] * 20 + [0] + [7] * 20 + [0]


def test_tokenizer_larger_than_the_model(make_job: JobMaker, text_directory: Path) -> None:
    job = make_job(path=str(text_directory))
    tokenizer = prepare(job).tokenizer_directory
    for settings in ({"tokenizer": tokenizer}, {"tokenizer": tokenizer, "max_documents": 3}):  # cached or not
        with pytest.raises(DataError, match="has 300 tokens, the model's vocabulary_size is 299"):
            prepare(make_job(path=str(text_directory), **settings), 299)


def test_empty_and_too_small(make_job: JobMaker, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(
        DataError, match=r"data\.path='.*' is empty: no document has any text .*; give a path with text"
    ):
        prepare(make_job(path=str(tmp_path / "empty.txt")))
    (tmp_path / "none.jsonl").write_text('{"input_ids": []}\n')
    with pytest.raises(
        DataError, match=r"is empty: no document has any token in its column 'input_ids' \(data\.field\)"
    ):
        prepare(make_job(path=str(tmp_path / "none.jsonl"), format="tokens"))
    (tmp_path / "small.txt").write_text("too small")
    with pytest.raises(DataError, match="too few"):
        prepare(make_job(path=str(tmp_path / "small.txt"), sequence_length=256))


def test_stdlib(make_job: JobMaker) -> None:
    data = prepare(make_job(max_documents=40, vocabulary_size=512, sequence_length=64), 512)
    assert data.documents == 40
    assert data.unigram_entropy is not None and 3 < data.unigram_entropy < np.log(512)
    assert data.entropy_of(1) != data.unigram_entropy


def test_unwritable_cache(make_job: JobMaker, text_directory: Path) -> None:
    with pytest.raises(DataError, match=r"cannot be written .*set data.cache_directory"):
        prepare(make_job(path=str(text_directory), cache_directory=str(text_directory / "1.txt")))


def test_a_damaged_cache_is_named(make_job: JobMaker, text_directory: Path) -> None:
    job = make_job(path=str(text_directory))
    directory = Path(str(prepare(job).directory))
    (directory / "tokens.arrow").write_bytes(b"")
    with pytest.raises(DataError, match=r"tokens\.arrow cannot be read .*delete"):
        prepare(job)


def test_a_directory_is_built_once_by_many(tmp_path: Path) -> None:
    built, said = [], []

    def build(target: Path) -> None:
        time.sleep(0.1)
        built.append(target)
        (target / COMPLETE).write_text("{}")

    threads = [threading.Thread(target=build_once, args=(tmp_path / "x", build, said.append)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
    assert any("waiting" in line for line in said)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["x"]


def test_a_half_built_directory_is_never_used(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x.building-dead").mkdir()

    def fails(target: Path) -> None:
        (target / "part").write_text("part")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_once(tmp_path / "x", fails, print)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    build_once(tmp_path / "x", lambda target: (target / COMPLETE).write_text("{}") and None, print)
    assert (tmp_path / "x" / COMPLETE).is_file()


class Squares:
    """A map-style data set as a user may write it."""

    def __init__(self, size: int = 10, kind: str = "good") -> None:
        self.size, self.kind = size, kind
        if kind == "raises":
            raise RuntimeError("no such file")

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        if self.kind == "list":
            return [1]
        if self.kind == "numbers":
            return {"x": index}
        if self.kind == "labels only":
            return {"labels": torch.tensor(index)}
        length = index + 1 if self.kind == "ragged" else 2
        return {"x": torch.full((length,), float(index)), "labels": torch.tensor([index**2])}


def test_data_set_of_ones_own(make_job: JobMaker) -> None:
    data = prepare(make_job(factory=f"{HERE}:Squares"))
    assert (len(data.train), len(data.validation), data.unigram_entropy) == (8, 2, None)
    batch = Stream(data.train, 3, 3, 4, 1, 1, 0).batches(1)[0]
    indices = [order(3, counter, 8) for counter in (3, 4, 5, 3)]
    assert batch.inputs["x"][:, 0].tolist() == indices
    assert batch.labels is not None
    assert batch.labels[:, 0].tolist() == [*(index**2 for index in indices[:3]), -100]
    held = next(iter(Stream(data.train, 3, 3, 3, 1, 1, 0).evaluation(data.validation)))[0]
    assert held.inputs["x"][:, 0].tolist() == [8, 9, 8] and held.counted.tolist() == [True, True, False]


BAD_FACTORIES = {
    "sample 0 is list; return a dict of tensors": {"kind": "list"},
    "sample 0 is a dict of int; return": {"kind": "numbers"},
    "has no model inputs": {"kind": "labels only"},
    r"raised RuntimeError: no such file \(.*test_prepare\.py:\d+\)": {"kind": "raises"},
    "has 1 samples": {"size": 1},
    "raised TypeError": {"unknown": 1},
}


@pytest.mark.parametrize("message", BAD_FACTORIES)
def test_bad_data_sets(make_job: JobMaker, message: str) -> None:
    with pytest.raises(DataError, match=message):
        prepare(make_job(factory=f"{HERE}:Squares", factory_arguments=BAD_FACTORIES[message]))


def test_ragged_samples(make_job: JobMaker) -> None:
    data = prepare(make_job(factory=f"{HERE}:Squares", factory_arguments={"kind": "ragged"}))
    with pytest.raises(DataError, match="all samples must have the same keys and shapes"):
        data.train.batch([0, 1], [0, 1], 0)


REFERENCES = {
    "not of the form 'package.module:name'": "tests.data",
    "module 'no_such_package' cannot be imported": "no_such_package:x",
    "Did you mean 'Squares'": f"{HERE}:Square",
}


@pytest.mark.parametrize("message", REFERENCES)
def test_bad_references(make_job: JobMaker, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare(make_job(factory=REFERENCES[message]))


def test_isolation_of_a_factorys_samples_is_refused(make_job: JobMaker) -> None:
    with pytest.raises(ConfigError, match=r"data\.isolate_documents"):
        prepare(make_job(factory=f"{HERE}:Squares", isolate_documents=True))
