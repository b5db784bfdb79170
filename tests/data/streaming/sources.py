"""Shards of every kind, and the stream that they make, written once more from its definition."""

from __future__ import annotations

import gzip
import io
import json
import random
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from shardwise.data.streaming.definition import StreamDefinition
from shardwise.data.streaming.sources import find_shards
from shardwise.data.streaming.tokens import StreamedTokens, StreamSettings
from shardwise.data.text_encoder import TextEncoder
from shardwise.job.data_section import DataSection
from shardwise.testing.oracle_data import mixed, shuffled_index

END = 256
SEED = 11
KINDS = ("jsonl", "jsonl.gz", "jsonl.zst", "parquet", "tar", "dataset")


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer whose ids are bytes, as its letters are ordered, and an end of text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({**{letter: id for id, letter in enumerate(letters)}, "<end>": END}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def documents(seed: int, shards: int, most: int = 30) -> list[list[str]]:
    """Return drawn documents of shards, some empty, no two alike."""
    draw = random.Random(seed)
    return [
        [
            "" if draw.random() < 0.1 else f"{shard} {row} " + "x" * draw.randrange(60)
            for row in range(draw.randrange(most))
        ]
        for shard in range(shards)
    ]


def write(directory: Path, kind: str, contents: Sequence[Sequence[str]]) -> None:
    """Write shards; a saved data set is one directory of several files."""
    directory.mkdir(parents=True, exist_ok=True)
    for number, texts in enumerate(contents):
        path = directory / f"part-{number:03}.{kind}"
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        if kind == "parquet":
            pq.write_table(pa.table({"text": pa.array(texts, pa.string())}), path, row_group_size=7)
        elif kind == "tar":
            _write_tar(path, texts)
        elif kind == "dataset":
            with pa.OSFile(str(directory / f"data-{number:05}.arrow"), "wb") as sink:
                table = pa.table({"text": pa.array(texts, pa.string())})
                with pa.ipc.new_stream(sink, table.schema) as writer:
                    writer.write_table(table, max_chunksize=5)
        elif kind == "jsonl.gz":
            path.write_bytes(gzip.compress(lines.encode()))
        elif kind == "jsonl.zst":
            with pa.CompressedOutputStream(pa.OSFile(str(path), "wb"), "zstd") as sink:
                sink.write(lines.encode())
        else:
            path.write_text(lines)
    if kind == "dataset":
        files = [{"filename": f"data-{number:05}.arrow"} for number in range(len(contents))]
        (directory / "state.json").write_text(json.dumps({"_data_files": files, "_indices_files": None}))


def _write_tar(path: Path, texts: Sequence[str]) -> None:
    with tarfile.open(path, "w") as archive:
        for row, text in enumerate(texts):
            for extension, content in (("cls", b"7"), ("txt", text.encode())):
                member = tarfile.TarInfo(f"sample{row:04}.{extension}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


def define(directory: Path, held_out: float = 0.2, rows: int = 16, skips: bool = False) -> StreamDefinition:
    """Return the definition of the stream of a directory."""
    kind = "dataset" if (directory / "state.json").exists() else "auto"
    found = find_shards(DataSection(path=str(directory), streaming=True, format=kind))
    share = int(held_out * 2**64)
    return StreamDefinition(found.shards, found.container, "text", False, END, END + 1, SEED, rows, share, skips)


def opened(definition: StreamDefinition, root: Path, limit: int = 1 << 14, workers: int = 1) -> StreamedTokens:
    """Return the tokens of a stream."""
    return StreamedTokens(definition, StreamSettings(root, limit, workers, TextEncoder(byte_tokenizer().to_str())))


def expected(contents: Sequence[Sequence[str]], held_out: float = 0.2, rows: int = 16) -> Iterator[list[int]]:
    """Yield the token ids of the documents that train, by the definition."""
    tokenizer, number, count = byte_tokenizer(), 0, len(contents)
    buffer: list[str] = []
    begin = (0, 0)
    while True:
        for row, text in enumerate(contents[shuffled_index(SEED, number, count)]):
            buffer.append(text)
            if len(buffer) == rows:
                yield from _shuffled(tokenizer, buffer, begin, held_out)
                buffer, begin = [], (number, row + 1)
        number += 1
        if number % count == 0:
            yield from _shuffled(tokenizer, buffer, begin, held_out)
            buffer, begin = [], (number, 0)


def _shuffled(tokenizer: Tokenizer, buffer: list[str], begin: tuple[int, int], held_out: float) -> Iterator[list[int]]:
    key = np.array([SEED, xxhash.xxh3_64_intdigest(f"{begin[0]}:{begin[1]}".encode())], dtype=np.uint64)
    draws = np.random.Philox(key=key).random_raw(len(buffer)).tolist()
    for _, text in sorted(zip(draws, buffer, strict=True)):
        ids = [*tokenizer.encode(text).ids, END] if text else []
        digest = xxhash.xxh3_64_intdigest(np.array(ids, dtype="<i4").tobytes())
        if ids and mixed(digest ^ mixed(SEED)) >= int(held_out * 2**64):
            yield ids


def first_tokens(contents: Sequence[Sequence[str]], count: int, held_out: float = 0.2, rows: int = 16) -> list[int]:
    """Return the first tokens of the stream."""
    tokens: list[int] = []
    for ids in expected(contents, held_out, rows):
        tokens += ids
        if len(tokens) >= count:
            break
    return tokens[:count]
