"""A directory of tokens: the same stream as from the corpus, and everything that does not fit it is named."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

from shardwise.data.corpus import find_corpus, with_format
from shardwise.data.evaluation_sets import job_of_set
from shardwise.data.prepare import prepare
from shardwise.data.remote_tokens import is_taken, upload
from shardwise.data.shared_rows import rendering_of
from shardwise.data.shared_tokens import write_shared
from shardwise.data.statistics import statistics
from shardwise.data.store import COMPLETE
from shardwise.data.token_data import TokenData
from shardwise.errors import ConfigError, DataError
from shardwise.job.schema import Job
from tests.data.chats import BLOCKS, CHATS, as_messages, chat_job
from tests.data.conftest import TEXTS, JobMaker
from tests.s3 import s3, s3_server  # noqa: F401


def shared_job_keys(directory: object, tmp_path: Path) -> dict[str, object]:
    return {"path": str(directory), "vocabulary_size": 4096, "cache_directory": str(tmp_path / "other")}


def write(data: TokenData, target: Path) -> Path:
    assert data.directory is not None and data.tokenizer_directory is not None
    target.mkdir()
    write_shared(Path(data.directory), Path(data.tokenizer_directory), target)
    return target


def test_a_directory_gives_the_tokens_of_its_corpus(text_directory: Path, make_job: JobMaker, tmp_path: Path) -> None:
    own = prepare(make_job(path=str(text_directory)), 300)
    directory = write(own, tmp_path / "shared")
    shutil.rmtree(text_directory)
    shutil.rmtree(tmp_path / "cache")
    job = make_job(**shared_job_keys(directory, tmp_path))
    data = prepare(job, 300)
    assert (data.content, data.documents, data.eos_id) == (own.content, 4, 0)
    assert data.train.batch([1], [0], 5).inputs["input_ids"].shape == (1, 16)
    assert job_of_set(job, "set.txt", data).data.tokenizer == str(directory / "tokenizer")
    (numbers,) = statistics([("data", data)])
    assert (numbers["documents"], numbers["duplicates"], numbers["longer_share"]) == (len(TEXTS), 0, 1.0)
    assert 0 < numbers["vocabulary_seen"] <= 300 and sum(count for _, count in numbers["most_frequent"]) < data.tokens
    with pytest.raises(DataError, match="has 300 tokens, the model's vocabulary_size is 299"):
        prepare(job, 299)
    with pytest.raises(ConfigError, match=r"data.max_documents=2 has no meaning with data.path"):
        prepare(make_job(**shared_job_keys(directory, tmp_path), max_documents=2))
    with pytest.raises(ConfigError, match=r"holds tokens that are made, which data\.format=text"):
        prepare(make_job(**shared_job_keys(directory, tmp_path), format="text"))
    other = tmp_path / "tokenizer"
    shutil.copytree(directory / "tokenizer", other)
    (other / "tokenizer.json").write_text((other / "tokenizer.json").read_text() + "\n")
    with pytest.raises(DataError, match=r"holds tokens of another tokenizer than data\.tokenizer="):
        prepare(make_job(**shared_job_keys(directory, tmp_path), tokenizer=str(other)))
    damage(directory, job)


def damage(directory: Path, job: object) -> None:
    """Refuse a byte that has changed, a missing file and another layout, each with its name."""
    tokens = directory / "tokens.arrow"
    content = bytearray(tokens.read_bytes())
    content[400] ^= 1
    tokens.write_bytes(content)
    with pytest.raises(DataError, match=r"tokens\.arrow is damaged"):
        prepare(job)  # type: ignore[arg-type]
    tokens.unlink()
    with pytest.raises(DataError, match=r"tokens\.arrow is missing; copy the directory again"):
        prepare(job)  # type: ignore[arg-type]
    manifest = json.loads((directory / COMPLETE).read_text())
    manifest["shared"]["version"] = 99
    (directory / COMPLETE).write_text(json.dumps(manifest))
    with pytest.raises(DataError, match=r"holds tokens of layout 99, and this shardwise reads 1"):
        prepare(job)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_bucket_holds_a_directory(
    text_directory: Path,
    make_job: JobMaker,
    tmp_path: Path,
    s3: str,  # noqa: F811
) -> None:
    own = prepare(make_job(path=str(text_directory)), 300)
    directory = write(own, tmp_path / "shared")
    url = f"{s3}/tokens"
    with pytest.raises(DataError, match="does not exist"):
        prepare(make_job(**shared_job_keys(url + "-none", tmp_path)))
    assert not is_taken(url)
    upload(directory, url)
    assert is_taken(url)
    data = prepare(make_job(**shared_job_keys(url, tmp_path)), 300)
    assert data.content == own.content
    assert data.directory is not None and Path(data.directory).is_relative_to(tmp_path / "other")


def test_a_manifest_names_nothing_outside_of_its_directory(make_job: JobMaker, tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / COMPLETE).write_text(json.dumps({"shared": {"files": {"../../escaped": [0, ""]}}}))
    with pytest.raises(DataError, match="not below it"):
        prepare(make_job(**shared_job_keys(f"file://{tmp_path / 'bad'}", tmp_path)))
    assert not list(tmp_path.rglob("escaped"))


REFUSED = {
    "is missing; copy the directory there again": FileNotFoundError(2, "No such file"),
    "cannot be fetched: PermissionError: .*may this user read": PermissionError("Access Denied"),
    r"the cache .* cannot be written \(.*No space left": OSError(errno.ENOSPC, "No space left on device"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_file_that_does_not_come_is_no_cache_that_cannot_be_written(
    message: str, make_job: JobMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise REFUSED[message]

    (tmp_path / "far").mkdir()
    (tmp_path / "far" / COMPLETE).write_text(json.dumps({"shared": {"files": {"hashes.arrow": [0, ""]}}}))
    monkeypatch.setattr(LocalFileSystem, "get_file", refuse)
    where = "" if message.startswith("the cache") else f"{tmp_path}/far/hashes.arrow "
    with pytest.raises(DataError, match=f"^{where}{message}"):
        prepare(make_job(**shared_job_keys(f"file://{tmp_path / 'far'}", tmp_path)))


def test_a_directory_of_rows_gives_the_samples_of_its_files(tmp_path: Path) -> None:
    rows = [{"messages": as_messages(turns)} for turns in CHATS]
    job = chat_job(tmp_path, rows, format="chat", packing=True)
    own = prepare(job)
    directory = tmp_path / "shared"
    directory.mkdir()
    assert own.directory is not None and job.data.tokenizer is not None
    tokenizer = Path(job.data.tokenizer)
    write_shared(Path(own.directory), tokenizer, directory, rendering_of(job, tokenizer))
    Path(str(job.data.path)).unlink()

    def other(**keys: object) -> Job:
        data = {"path": str(directory), "cache_directory": str(tmp_path / "other"), "sequence_length": 64}
        return with_format(Job.model_validate({"data": {**data, "validation_fraction": 0.2, "packing": True, **keys}}))

    data = prepare(other())
    assert other().objective == "sft" and (data.content, data.row_counts) == (own.content, own.row_counts)
    given, expected = data.train.batch([0], [0], 5), own.train.batch([0], [0], 5)
    assert given.labels is not None and expected.labels is not None and torch.equal(given.labels, expected.labels)
    sources = [{"path": str(directory), "name": name, "weight": 1.0} for name in ("a", "b")]
    assert prepare(other(path=None, sources=sources)).documents == 2 * own.documents
    with pytest.raises(ConfigError, match=r"this job's data\.train_on is all; set data\.train_on: assistant, or"):
        prepare(other(train_on="all"))
    (tmp_path / "other.jinja").write_text(BLOCKS)
    with pytest.raises(ConfigError, match=r"another chat template than data\.chat_template='.*; leave data\.chat_temp"):
        prepare(other(chat_template=str(tmp_path / "other.jinja")))
    with pytest.raises(ConfigError, match=r"tokens of rows in the format chat that are made, which data\.format=text"):
        other(format="text")
    for key, value in {"max_documents": 2, "filter": {"source": "a"}}.items():
        with pytest.raises(ConfigError, match=rf"data\.{key}=.* has no meaning with data\.path"):
            prepare(other(**{key: value}))
    with pytest.raises(DataError, match=r"holds tokens that are made and no corpus, which is needed here"):
        find_corpus(other().data)
