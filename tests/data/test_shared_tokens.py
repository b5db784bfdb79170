"""A directory of tokens: the same stream as from the corpus, and everything that does not fit it is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from shardwise.data.evaluation_sets import job_of_set
from shardwise.data.prepare import prepare
from shardwise.data.remote_tokens import is_taken, upload
from shardwise.data.shared_tokens import write_shared
from shardwise.data.statistics import statistics
from shardwise.data.store import COMPLETE
from shardwise.data.token_data import TokenData
from shardwise.errors import ConfigError, DataError
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
