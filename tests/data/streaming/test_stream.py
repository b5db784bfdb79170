"""Streams against their definition: every kind of shard, positions, ranks that share blocks, and what goes wrong."""

from __future__ import annotations

import gzip
import os
import signal
import tarfile
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from shardwise.data.streaming.block_cache import BlockCache
from shardwise.data.streaming.definition import Position, StreamDefinition
from shardwise.data.streaming.prepare import PreparedStream, find_stream, values_in_order
from shardwise.data.streaming.producer import StreamReader, joined_tokens
from shardwise.data.streaming.rows import RowReader
from shardwise.data.streaming.workers import Encoder
from shardwise.data.text_encoder import TextEncoder
from shardwise.errors import DataError
from shardwise.job.data_section import DataSection
from shardwise.job.sources import load_job
from shardwise.testing.oracle_stream import StreamSource
from tests.data.streaming.sources import KINDS, SEED, byte_tokenizer, define, documents, first_tokens, opened, write


def read_here(definition: StreamDefinition, directory: Path, count: int, position: Position = Position()) -> np.ndarray:  # noqa: B008
    """Return tokens of a stream without any other process."""
    tokenizer = TextEncoder(byte_tokenizer().to_str())
    encoder, tokens = Encoder(definition, tokenizer), np.empty(0, dtype=np.int32)
    for buffer in StreamReader(definition, directory, lambda **facts: None).buffers(position):
        tokens = np.append(tokens, joined_tokens(buffer, encoder.encode(buffer.values), definition))
        if len(tokens) >= count:
            return np.where(tokens < 0, ~tokens, tokens)[:count]
    raise AssertionError


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_shard_makes_the_defined_stream(kind: str, tmp_path: Path) -> None:
    contents = documents(3, 5)
    write(tmp_path / "source", kind, contents)
    tokens = read_here(define(tmp_path / "source"), tmp_path, 6000)  # more than two passes
    assert tokens.tolist() == first_tokens(contents, 6000)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), eos_token="<end>")
    tokenizer.save_pretrained(str(tmp_path / "tokenizer"))
    data = {"path": str(tmp_path / "source"), "streaming": True, "tokenizer": str(tmp_path / "tokenizer")}
    if kind == "dataset":
        data["format"] = kind
    data |= {"sequence_length": 50, "validation_fraction": 0.2, "validation_sequences": 2, "shuffle_buffer_size": 16}
    oracle = StreamSource(load_job({"data": data, "training": {"seed": SEED}}), data["tokenizer"])
    read = oracle.rows(range(119)).inputs["input_ids"]
    assert read.flatten().tolist() == first_tokens(contents, 5950)


def test_ranks_share_bounded_blocks_and_go_on_from_a_position(tmp_path: Path) -> None:
    contents = documents(4, 6)
    write(tmp_path / "source", "jsonl.gz", contents)
    right = first_tokens(contents, 20_000)
    definition, root = define(tmp_path / "source"), tmp_path / "running"
    ranks = [opened(definition, root, limit=1 << 12) for _ in range(2)]
    try:
        for rank, stream in enumerate(ranks):
            stream.join("run", rank, 2)
        for start in range(0, 12_000, 1_000):
            for rank, stream in enumerate(ranks):
                stream.advance(start)
                first = start + 500 * rank
                assert stream.read(first, first + 501).tolist() == right[first : first + 501]
            [directory] = root.iterdir()
            assert sum(4 * block.length for block in BlockCache(directory).blocks()) < (1 << 12) + 8_000
        places = {stream.position(12_000) for stream in ranks}
        [place] = places
        assert 0 < place.tokens < 12_000 and BlockCache(directory).blocks()[0].position.tokens > 0
        ends = [number + 1 for number, token in enumerate(right) if token == 256]
        starts = ranks[1].document_starts(11_500, 12_000)
        assert starts.tolist() == [end for end in ends if 11_500 <= end < 12_000]
    finally:
        for stream in ranks:
            stream.close()
    assert not list(root.iterdir())
    again = opened(definition, root)
    try:
        again.begin(place, 12_000)
        assert again.read(12_000, 20_000).tolist() == right[12_000:]
    finally:
        again.close()
    assert not list(root.iterdir())


def test_damage_names_shard_and_row_and_is_skipped_where_asked(tmp_path: Path) -> None:
    contents = [["a" * 40] * 9, ["b" * 40] * 9, ["c" * 40] * 9]
    write(tmp_path / "source", "jsonl", contents)
    path = tmp_path / "source" / "part-001.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:4], '{"text": "cut o', *lines[5:]]))
    with pytest.raises(DataError, match=r"^part-001.jsonl, row 4: not valid JSON"):
        read_here(define(tmp_path / "source", held_out=0), tmp_path, 4000)
    skipping = define(tmp_path / "source", held_out=0, skips=True)
    whole = [contents[0], contents[1][:4], contents[2]]
    assert read_here(skipping, tmp_path, 2000).tolist() == first_tokens(whole, 2000, 0)
    jobs = (DataSection(path=str(path), streaming=True, on_bad_files=answer) for answer in ("error", "skip"))
    contents_of = [PreparedStream(find_stream(data), None, 300, SEED).content for data in jobs]
    assert contents_of[0] == contents_of[1]  # a run that has ended there may go on and skip it
    reader = StreamReader(skipping, tmp_path, lambda **facts: None)
    for buffer, _ in zip(reader.buffers(Position()), range(4), strict=False):
        assert buffer
    assert reader.skipped == {"part-001.jsonl": 4}


def test_byte_order_marks_are_no_text(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name, text in (("1.txt", "one"), ("2.json", '{"text": "two"}')):
            (tmp_path / name).write_text(text, encoding="utf-8-sig")
            archive.add(tmp_path / name, name)
    rows = RowReader("webdataset", "text", False, None).values(tmp_path / "a.tar", "a.tar", 0)
    assert list(rows) == [(0, "one"), (1, "two")]


@pytest.mark.parametrize("compression", ["", "gz"])
@pytest.mark.parametrize("damage", ["header", "boundary", "in a header"])
def test_a_tar_with_a_damaged_header_or_without_its_end_is_no_shorter_one(
    damage: str, compression: str, tmp_path: Path
) -> None:
    write(tmp_path, "tar", [[f"document {row}" for row in range(10)]])
    content = bytearray((tmp_path / "part-000.tar").read_bytes())
    fourth = 3 * 4 * 512  # a sample is two members of two blocks each
    if damage == "header":
        content[fourth + 5] ^= 0xFF
    else:
        del content[fourth + (100 if damage == "in a header" else 0) :]
    path = tmp_path / f"damaged.tar.{compression}".rstrip(".")
    path.write_bytes(gzip.compress(content) if compression else content)
    rows = RowReader("webdataset", "text", False, None).values(path, "damaged.tar", 0)
    assert [next(rows) for _ in range(2)] == [(0, "document 0"), (1, "document 1")]
    with pytest.raises(DataError, match=r"^damaged.tar, row 2: the shard cannot .*: the archive is damaged or cut"):
        next(rows)


@pytest.mark.parametrize("skips", [False, True])
def test_shards_that_change_or_vanish_are_no_damage_to_skip(skips: bool, tmp_path: Path) -> None:
    write(tmp_path / "source", "jsonl", documents(5, 3))
    definition, path = define(tmp_path / "source", skips=skips), tmp_path / "source" / "part-001.jsonl"
    path.write_text("other")
    reader = RowReader("jsonl", "text", False, None)
    for words in ("has changed since it was listed", "has vanished"):
        with pytest.raises(DataError, match=f"part-001.jsonl {words}"):
            read_here(definition, tmp_path, 4000)
        with pytest.raises(DataError, match=f"part-001.jsonl {words}"):
            list(values_in_order(definition.shards, reader, skips))
        path.unlink(missing_ok=True)


def test_gone_changed_and_dead_sources_are_named(tmp_path: Path) -> None:
    contents = documents(5, 3)
    write(tmp_path / "source", "parquet", contents)
    definition = define(tmp_path / "source")
    (tmp_path / "source" / "part-001.parquet").write_bytes(b"other")
    with pytest.raises(DataError, match=r"part-001.parquet has changed since it was listed"):
        read_here(definition, tmp_path, 4000)
    (tmp_path / "source" / "part-001.parquet").unlink()
    stream = opened(definition, tmp_path / "running")
    try:
        with pytest.raises(DataError, match=r"the stream: part-001.parquet has vanished"):
            stream.read(0, 4000)
        stream.close()
        stream = stream.named("web")
        with pytest.raises(DataError, match=r"data.sources, web: part-001.parquet has vanished"):
            stream.read(0, 4000)
        assert "for data: web: part-001.parquet is slow" in stream._waiting_for(4000)
    finally:
        stream.close()


def test_a_killed_producer_ends_every_rank(tmp_path: Path) -> None:
    write(tmp_path / "source", "jsonl", documents(6, 3))
    ranks = [opened(define(tmp_path / "source"), tmp_path / "running") for _ in range(2)]
    try:
        for rank, stream in enumerate(ranks):
            stream.join("run", rank, 2)
            stream.read(0, 10)
        assert ranks[0]._process is not None
        os.kill(ranks[0]._process.pid, signal.SIGKILL)
        for stream in ranks:
            with pytest.raises(DataError, match="process that reads the stream ahead is gone"):
                stream.read(0, 1_000_000)
    finally:
        for stream in ranks:
            stream.close()
    assert not list((tmp_path / "running").iterdir())


def test_a_source_without_training_tokens_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "source", "jsonl", [["", ""], [""]])
    stream = opened(define(tmp_path / "source"), tmp_path / "running")
    try:
        with pytest.raises(DataError, match="a pass through all 2 shards has no token to train on"):
            stream.read(0, 10)
    finally:
        stream.close()
