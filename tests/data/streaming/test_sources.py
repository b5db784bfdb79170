"""Shards at URLs and on the Hub, from a mirror of it on loopback; what cannot be listed is named."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import fsspec
import pytest

from shardwise.data.corpus import data_format
from shardwise.data.streaming import fetch
from shardwise.data.streaming.fetch import fetched_shard, remote_stamp
from shardwise.data.streaming.sources import find_shards
from shardwise.errors import ConfigError, DataError
from shardwise.job.data_section import DataSection
from tests.data.streaming.hub import served
from tests.data.streaming.sources import documents, write

HUB = """
import sys
from pathlib import Path
from shardwise.data.streaming.sources import find_shards
from shardwise.data.streaming.fetch import fetched_shard
from shardwise.errors import DataError
from shardwise.job.data_section import DataSection
for keys in ({}, {"dataset_config": "other"}, {"dataset_split": "test"}, {"dataset_split": "nowhere"},
             {"dataset_revision": "lost"}, {"dataset": "org/none"}):
    try:
        found = find_shards(DataSection(streaming=True, **{"dataset": "org/name", **keys}))
    except DataError as error:
        print(keys, "refused:", error)
        continue
    for shard in found.shards:
        with fetched_shard(shard, Path(sys.argv[1]), lambda **facts: None) as path:
            print(keys, found.container, shard.name, len(path.read_bytes()) == shard.size, bool(shard.stamp))
"""


def test_urls_are_listed_fetched_and_checked(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    for name in ("a", "b"):
        memory.pipe(f"/streams/{name}.jsonl", b'{"text": "x"}\n')
    try:
        found = find_shards(DataSection(path="memory://streams", streaming=True))
        assert (found.container, [shard.name for shard in found.shards]) == ("jsonl", ["a.jsonl", "b.jsonl"])
        assert find_shards(DataSection(path="memory://streams/*.jsonl", streaming=True)).shards == found.shards
        told = []
        with fetched_shard(found.shards[0], tmp_path, lambda **facts: told.append(facts)) as path:
            assert path.read_bytes() == b'{"text": "x"}\n'
        assert told[-1]["fetched"] == found.shards[0].size and not list(tmp_path.iterdir())
        memory.pipe("/streams/a.jsonl", b'{"text": "longer"}\n')
        with (
            pytest.raises(DataError, match=r"a.jsonl has changed since it was listed"),
            fetched_shard(found.shards[0], tmp_path, lambda **facts: None),
        ):
            pass
        memory.rm("/streams/b.jsonl")
        with (
            pytest.raises(DataError, match=r"b.jsonl has vanished"),
            fetched_shard(found.shards[1], tmp_path, lambda **facts: None),
        ):
            pass
    finally:
        memory.rm("/streams", recursive=True)
    with pytest.raises(DataError, match="memory://streams"):
        find_shards(DataSection(path="memory://streams", streaming=True))


@pytest.mark.parametrize("failures", [1, 9])
def test_a_fetch_that_fails_is_tried_again(failures: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe("/streams/a.jsonl", b'{"text": "x"}\n')
    opened, left = memory.open, iter([OSError("the line is busy")] * failures)

    def lost_sometimes(*arguments: Any, **options: Any) -> Any:
        for error in left:
            raise error
        return opened(*arguments, **options)

    try:
        [shard] = find_shards(DataSection(path="memory://streams", streaming=True)).shards
        monkeypatch.setattr(fetch, "PAUSES", (0.0, 0.0))
        monkeypatch.setattr(memory, "open", lost_sometimes)
        with (
            nullcontext() if failures == 1 else pytest.raises(DataError, match=r"a.jsonl cannot be fetched .* is busy"),
            fetched_shard(shard, tmp_path, lambda **facts: None) as path,
        ):
            assert path.read_bytes() == b'{"text": "x"}\n'
    finally:
        memory.rm("/streams", recursive=True)
    assert len(list(left)) == max(0, failures - 1 - len(fetch.PAUSES))


@pytest.mark.slow
def test_names_of_the_hub_are_read_from_a_mirror(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "org" / "name"
    write(repository / "plain", "jsonl", documents(1, 2))
    write(repository / "other", "parquet", documents(2, 1))
    write(repository / "held", "jsonl", documents(3, 1))
    (repository / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  default: true\n  data_files:\n  - {split: train, path: 'plain/*'}\n"
        "  - {split: test, path: 'held/*'}\n- config_name: other\n  data_files: 'other/*'\n---\n"
    )
    with served(tmp_path / "hub") as address:
        environment = {"HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home")}
        done = subprocess.run(  # these variables are read when the library is loaded
            [sys.executable, "-c", HUB, str(tmp_path)],
            env={**os.environ, **environment}, capture_output=True, text=True, check=False,
        )  # fmt: skip
    lines = done.stdout.splitlines()
    assert lines[:4] == [
        "{} jsonl part-000.jsonl True True",
        "{} jsonl part-001.jsonl True True",
        "{'dataset_config': 'other'} parquet part-000.parquet True True",
        "{'dataset_split': 'test'} jsonl part-000.jsonl True True",
    ], done.stderr
    assert "has no split 'nowhere' (data.dataset_split); use train, test" in lines[4]
    assert "cannot be listed" in lines[5] and "cannot be listed" in lines[6]


@pytest.mark.parametrize("header", ["ETag", "Content-MD5", "Digest", "Last-Modified"])
def test_any_header_of_a_server_tells_versions_of_a_file_apart(header: str) -> None:
    """fsspec names what an HTTP server says of a file as the server does, and not every server has ETags."""
    first, second = ({"size": 5, "url": "http://host/a.jsonl", header: value} for value in ("one", "two"))
    assert remote_stamp(first) == (5, "one") != remote_stamp(second)


def shards_of(path: Path | str, **keys: Any) -> list[str]:
    return [shard.name for shard in find_shards(DataSection(path=str(path), streaming=True, **keys)).shards]


def test_shards_of_two_kinds_are_refused_unless_the_format_picks_one(tmp_path: Path) -> None:
    for kind in ("tar", "jsonl"):
        write(tmp_path, kind, documents(1, 2))
    for path in (tmp_path, tmp_path / "*"):
        with pytest.raises(ConfigError, match=r"tars and jsonl; set data.format to jsonl, or give a path of one kind"):
            shards_of(path)
        with pytest.raises(ConfigError, match=r"tars and jsonl; give a path of one kind"):
            shards_of(path, format="tokens")
        assert shards_of(path, format="jsonl") == ["part-000.jsonl", "part-001.jsonl"]
    with pytest.raises(DataError, match=r"part-000.tar' holds no jsonl; set data.format to auto"):
        shards_of(tmp_path / "part-000.tar", format="jsonl")
    for pattern in ("*.tar", "part-00[01].tar", "part-00?.tar"):
        assert shards_of(tmp_path / pattern, format="tokens") == ["part-000.tar", "part-001.tar"]
    write(tmp_path / "alone", "tar", documents(1, 1))
    (tmp_path / "alone" / "sizes.json").write_text("{}")
    assert shards_of(tmp_path / "alone") == ["part-000.tar"]


def test_tars_in_hidden_folders_are_left_out_and_linked_ones_read(tmp_path: Path) -> None:
    for folder in ("elsewhere", "source/a", "source/.kept"):
        write(tmp_path / folder, "tar", documents(1, 1))
    (tmp_path / "source" / "b").symlink_to(tmp_path / "elsewhere")
    assert shards_of(tmp_path / "source") == ["a/part-000.tar", "b/part-000.tar"]


def test_a_format_picks_shards_at_a_url() -> None:
    memory = fsspec.filesystem("memory")
    for name in ("a.jsonl", "b.parquet"):
        memory.pipe(f"/streams/{name}", b"{}")
    try:
        with pytest.raises(DataError, match=r"format=auto holds jsonl and parquet; .* give a path of one kind"):
            shards_of("memory://streams")
        assert shards_of("memory://streams", format="parquet") == ["b.parquet"]
        with pytest.raises(DataError, match=r"format=dataset holds jsonl and parquet"):
            shards_of("memory://streams", format="dataset")
    finally:
        memory.rm("/streams", recursive=True)


@pytest.mark.parametrize("kind", ["jsonl", "tar", "dataset"])
def test_no_two_shards_have_one_name(kind: str, tmp_path: Path) -> None:
    for folder in ("a", "b"):
        write(tmp_path / folder, kind, documents(1, 1))
    end, keys = ("", {"format": "dataset"}) if kind == "dataset" else (f"/*.{kind}", {})
    name = "data-00000.arrow" if kind == "dataset" else f"part-000.{kind}"
    assert shards_of(f"{tmp_path}/*{end}", **keys) == [f"a/{name}", f"b/{name}"]
    assert shards_of(f"{tmp_path}/a*{end}", **keys) == [name]


def test_a_password_in_a_url_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError, match=r"\*\*\*@host") as raised:
        data_format(DataSection(path="https://me:secret@host/part.jsonl", streaming=True))
    assert "secret" not in str(raised.value)
