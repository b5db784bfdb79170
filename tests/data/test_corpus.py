"""Documents of every format, in a fixed order, and named errors for what cannot be read."""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
from pyarrow import parquet

from shardwise.data import readers
from shardwise.data.corpus import Corpus, data_format, find_corpus, stdlib_files
from shardwise.data.streaming.rows import RowReader
from shardwise.data.streaming.sources import describe_listing, find_shards
from shardwise.errors import ConfigError, DataError
from shardwise.job.data_section import DataSection
from shardwise.job.schema import Job
from shardwise.testing.oracle_rows import _rows_of_file
from tests.data.conftest import TEXTS


def corpus_of(**data: Any) -> Corpus:
    return find_corpus(DataSection(**data))


def documents(corpus: Corpus) -> list[str]:
    found, parts = [], []
    for text, last in corpus.texts():
        parts.append(text)
        if last:
            found.append("".join(parts))
            parts = []
    return found


def write(directory: Path, kind: str, rows: dict[str, list[Any]]) -> Path:
    directory.mkdir(exist_ok=True)
    if kind == "jsonl":
        path = directory / "rows.jsonl"
        columns = list(rows)
        lines = [json.dumps(dict(zip(columns, values, strict=True))) for values in zip(*rows.values(), strict=True)]
        path.write_text("\n".join(lines) + "\n\n")
    elif kind == "csv":
        path = directory / "rows.csv"
        with path.open("w", newline="") as stream:
            csv.writer(stream).writerows([list(rows), *zip(*rows.values(), strict=True)])
    elif kind == "parquet":
        path = directory / "rows.parquet"
        parquet.write_table(pa.table(rows), path)
    else:
        path = directory / "saved"
        datasets.Dataset.from_dict(rows).save_to_disk(str(path))
    return path


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "dataset"])
@pytest.mark.parametrize("explicit", [True, False])
def test_rows_are_documents(tmp_path: Path, kind: str, explicit: bool) -> None:
    path = write(tmp_path / "in", kind, {"number": [1, 2, 3, 4], "text": TEXTS})
    corpus = corpus_of(path=str(path), format=kind if explicit else "auto")
    assert corpus.format == kind
    assert documents(corpus) == TEXTS


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "dataset"])
def test_rows_of_token_ids(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path / "in", kind, {"input_ids": [[1, 2, 3], [], [4]]})
    corpus = corpus_of(path=str(path), format="tokens")
    assert [row.tolist() for row in corpus.token_rows(5)] == [[1, 2, 3], [4]]
    with pytest.raises(DataError, match=r"(line|row) 3: input_ids holds 4, the vocabulary has 4"):
        list(corpus.token_rows(4))


QUOTED = 'id;text;lang\n1;"Two\nlines, with ""quotes""";en\n\n2;plain;de\n'


@pytest.mark.parametrize(("suffix", "separator"), [(".csv", ","), (".tsv", "\t"), (".csv.gz", ",")])
def test_cells_are_text_as_they_are_quoted(tmp_path: Path, suffix: str, separator: str) -> None:
    path, content = tmp_path / f"rows{suffix}", QUOTED.replace(";", separator).encode("utf-8-sig")
    path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    assert documents(corpus_of(path=str(path))) == ['Two\nlines, with "quotes"', "plain"]
    corpus = corpus_of(path=str(path), filter={"lang": "de"})
    assert [dict(row) for _, row in corpus.rows(["id"])] == [{"id": "2", "lang": "de"}]


def test_a_cell_may_be_as_long_as_a_document(tmp_path: Path) -> None:
    long = "0123456789" * 20_000
    path = write(tmp_path / "in", "csv", {"text": [long]})
    assert documents(corpus_of(path=str(path))) == [long]
    assert list(_rows_of_file(path)) == [{"text": long}]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("text,b\nx,1\ny\n", r"line 3: 1 cells, and the first line names 2 columns"),
        ("text,b\nx,y, and z,1\n", r"line 2: 4 cells"),
        ('text\n"x\n', r"line 2: not valid CSV"),
        ("text,text\nx,y\n", r"2 columns have the name 'text'"),
        ("a,b\nx,y\n", r"no column 'text' \(data.field\)"),
        ("", r"no column 'text'"),
    ],
)
def test_a_table_that_cannot_be_read_is_named(tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / "rows.csv").write_text(content)
    with pytest.raises(DataError, match=says):
        documents(corpus_of(path=str(tmp_path / "rows.csv"), format="csv"))


def test_a_filter_of_a_table_asks_for_text(tmp_path: Path) -> None:
    path = write(tmp_path / "in", "csv", {"text": ["a"], "year": [2024]})
    for wanted in (2024, [2024], {"min": 1}):
        with pytest.raises(ConfigError, match=r"cells of a CSV file are text; ask for text"):
            corpus_of(path=str(path), filter={"year": wanted})
    assert documents(corpus_of(path=str(path), filter={"year": "2024"})) == ["a"]


def test_a_table_has_no_token_ids(tmp_path: Path) -> None:
    path = write(tmp_path / "in", "csv", {"input_ids": ["1 2"]})
    with pytest.raises(DataError, match=r"data.format=tokens reads jsonl, parquet or a saved data set"):
        corpus_of(path=str(path), format="tokens")


def test_a_table_is_no_stream(tmp_path: Path) -> None:
    path = write(tmp_path / "in", "csv", {"text": ["a"]})
    with pytest.raises(ConfigError, match=r"holds csv: a stream reads .*; convert it, or leave streaming out"):
        find_shards(DataSection(path=str(path), streaming=True))


def test_tables_beside_documents_and_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "in", "csv", {"text": ["a"]})
    assert corpus_of(path=str(tmp_path / "in")).format == "csv"
    (path.parent / "notes.txt").write_text("b")
    assert documents(corpus_of(path=str(tmp_path / "in"))) == ["b", "text\r\na\r\n"]
    write(path.parent, "jsonl", {"text": ["c"]})
    with pytest.raises(ConfigError, match=r"holds files of csv and jsonl; set data.format to one of them"):
        corpus_of(path=str(tmp_path / "in"))
    assert documents(corpus_of(path=str(tmp_path / "in"), format="csv")) == ["a"]


def test_a_saved_data_set_with_splits_gives_train(tmp_path: Path) -> None:
    saved = datasets.DatasetDict(train=datasets.Dataset.from_dict({"text": ["a"]}))
    saved["test"] = datasets.Dataset.from_dict({"text": ["b"]})
    saved.save_to_disk(str(tmp_path / "saved"))
    assert documents(corpus_of(path=str(tmp_path / "saved"))) == ["a"]


def test_text_files_of_a_directory_or_glob_sorted(text_directory: Path) -> None:
    nested = text_directory / "z"
    nested.mkdir()
    (nested / "more.txt").write_text("more")
    (text_directory / ".hidden").write_text("hidden")
    assert documents(corpus_of(path=str(text_directory))) == [*TEXTS, "more"]
    assert documents(corpus_of(path=f"{text_directory}/*.txt")) == TEXTS
    assert documents(corpus_of(path=f"{text_directory}/**/*.txt")) == [*TEXTS, "more"]
    assert documents(corpus_of(path=f"{text_directory}/2.txt")) == [TEXTS[2]]
    assert documents(corpus_of(path=str(text_directory), max_documents=2)) == TEXTS[:2]


def test_a_directory_of_jsonl_ignores_other_files(tmp_path: Path) -> None:
    write(tmp_path / "in", "jsonl", {"text": ["a", "b"]})
    (tmp_path / "in" / "README.md").write_text("not data")
    (tmp_path / "in" / "info.json").write_text("{}")
    assert documents(corpus_of(path=str(tmp_path / "in"))) == ["a", "b"]


def test_json_files_that_are_left_out_are_told(tmp_path: Path) -> None:
    write(tmp_path / "in", "jsonl", {"text": ["a"]})
    (tmp_path / "in" / "below").mkdir()
    (tmp_path / "in" / "below" / "rows.json").write_text('{"text": "b"}')
    corpus = corpus_of(path=str(tmp_path / "in"))
    assert documents(corpus) == ["a"] and corpus.describe().endswith("1 file, 15 bytes, without 1 .json file")
    stream = DataSection(path=str(tmp_path / "in"), streaming=True)
    assert describe_listing(find_shards(stream), stream).endswith("1 shard, 15 bytes, without 1 .json file")
    assert documents(corpus_of(path=str(tmp_path / "in" / "**" / "*.json*"))) == ["b", "a"]


def test_a_directory_that_cannot_be_read_is_named(text_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scan = os.scandir
    (text_directory / "locked").mkdir()

    def scandir(path: str) -> Any:
        if str(path).endswith("locked"):  # root may read what nobody may
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(DataError, match=r"locked cannot be read: Permission denied; let this user read it, or name"):
        corpus_of(path=str(text_directory))


def test_long_documents_come_in_pieces(text_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "PIECE", 100)
    corpus = corpus_of(path=str(text_directory))
    found = list(corpus.texts())
    assert len(found) > 8
    assert all(text.endswith("\n") for text, _ in found)
    assert documents(corpus) == TEXTS


def test_a_document_that_ends_with_a_piece_is_one_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "PIECE", 4)
    (tmp_path / "a.txt").write_text("abc\nabc\n")
    (tmp_path / "b.txt").write_text("")
    assert documents(corpus_of(path=str(tmp_path))) == ["abc\nabc\n"]


def test_stdlib_is_the_default_and_has_no_tests() -> None:
    corpus = corpus_of(max_documents=3)
    assert corpus.format == "stdlib"
    assert len(documents(corpus)) == 3
    files = stdlib_files()
    assert len(files) > 300
    assert any(path.name == "dataclasses.py" for path in files)
    assert not [path for path in files if {"test", "tests", "site-packages"} & set(path.parts[-3:-1])]


def test_identity_follows_the_files(text_directory: Path) -> None:
    def identity(**data: Any) -> str:
        return corpus_of(path=str(text_directory), **data).identity

    before = identity()
    assert before == identity()
    assert before != identity(max_documents=2)
    (text_directory / "1.txt").write_text("changed")
    assert before != identity()


BAD_ROWS = {
    "long number": ('{"text": ' + "1" * 5000 + "}", r"bad\.jsonl, line 1: JSON that cannot be read .*remove the line"),
    "many levels": ('{"text": ' + "[" * 200_000, r"bad\.jsonl, line 1: JSON that cannot be read .*remove the line"),
    "corrupt": ('{"text": "a"}\n{"text": \n', r"bad\.jsonl, line 2: not valid JSON .*remove the line"),
    "not an object": ('{"text": "a"}\n[1]\n', r"line 2: expected a JSON object, found \[1\]; write one a line"),
    "missing column": ('{"txt": "a"}\n', r"line 1: no column 'text' \(data.field\). Did you mean 'txt'"),
    "not text": ('{"text": 5}\n', r"line 1: expected text, found int 5; write it as text"),
    "tokens instead": ('{"input_ids": [1]}\n', r"set data.format to tokens"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_bad_jsonl_names_file_and_line(tmp_path: Path, case: str) -> None:
    content, message = BAD_ROWS[case]
    (tmp_path / "bad.jsonl").write_text(content)
    with pytest.raises(DataError, match=message):
        documents(corpus_of(path=str(tmp_path / "bad.jsonl")))


@pytest.mark.parametrize("row", ['["a"]', "[1.5]", '"abc"', "null", "[[1], [2]]", "[1, [2]]", "[true]", "[-1]"])
def test_bad_token_rows(tmp_path: Path, row: str) -> None:
    (tmp_path / "bad.jsonl").write_text('{"input_ids": [1]}\n{"input_ids": ' + row + "}\n")
    with pytest.raises(
        DataError, match=r"line 2: input_ids (must be a list of integers|holds -1).*; write .*or remove the row"
    ):
        list(corpus_of(path=str(tmp_path / "bad.jsonl"), format="tokens").token_rows(None))


@pytest.mark.parametrize("kind", ["parquet", "dataset"])
def test_missing_column(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path / "in", kind, {"body": ["a"]})
    with pytest.raises(DataError, match=r"no column 'bod' .*Did you mean 'body'"):
        documents(corpus_of(path=str(path), field="bod"))


def test_corrupt_parquet(tmp_path: Path) -> None:
    path = write(tmp_path / "in", "parquet", {"text": TEXTS})
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(DataError, match=r"rows\.parquet cannot be read as Parquet"):
        documents(corpus_of(path=str(path)))


def test_corrupt_saved_data_set(tmp_path: Path) -> None:
    path = write(tmp_path / "in", "dataset", {"text": TEXTS})
    next(path.glob("*.arrow")).write_bytes(b"nothing")
    with pytest.raises(DataError, match="cannot be read as a saved data set"):
        documents(corpus_of(path=str(path)))


def test_invalid_utf8_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"fine")
    (tmp_path / "b.txt").write_bytes(b"not \xff\xfe")
    with pytest.raises(DataError, match=r"b\.txt is not valid UTF-8"):
        documents(corpus_of(path=str(tmp_path)))


def test_missing_path_names_the_nearest(text_directory: Path) -> None:
    with pytest.raises(DataError, match=r"'.*/text' does not exist. Did you mean '.*/texts'"):
        corpus_of(path=str(text_directory.parent / "text"))
    with pytest.raises(DataError, match="matches no file"):
        corpus_of(path=str(text_directory / "*.csv"))
    with pytest.raises(DataError, match="no file to read"):
        corpus_of(path=str(text_directory), format="parquet")
    with pytest.raises(DataError, match="not a directory written by datasets"):
        corpus_of(path=str(text_directory), format="dataset")


CONTRADICTIONS = {
    "jsonl needs data.path": {"format": "jsonl"},
    "would not be read with data.format=stdlib": {"format": "stdlib", "path": "x"},
    "would not be read with data.format=factory": {"factory": "a:b", "path": "x"},
    "give both, or neither": {"format": "factory"},
    "data.factory='a:b' with data.format=stdlib": {"format": "stdlib", "factory": "a:b"},
}


@pytest.mark.parametrize("message", CONTRADICTIONS)
def test_keys_that_contradict_each_other(message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        data_format(DataSection(**CONTRADICTIONS[message]))


def test_a_column_of_text_files_is_refused(text_directory: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.field='body' with data.format=text: .*leave data.field out"):
        corpus_of(path=str(text_directory), field="body")
    with pytest.raises(ConfigError, match=r"data.field='body' with data.format=stdlib"):
        corpus_of(field="body")


def test_mixed_formats_must_be_named(tmp_path: Path) -> None:
    write(tmp_path / "in", "jsonl", {"text": ["a"]})
    write(tmp_path / "in", "parquet", {"text": ["b"]})
    with pytest.raises(ConfigError, match=r"set data.format to one of them"):
        corpus_of(path=str(tmp_path / "in"))
    assert documents(corpus_of(path=str(tmp_path / "in"), format="parquet")) == ["b"]


def test_links_below_a_directory_are_followed_once(text_directory: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "linked.txt").write_text("linked")
    (text_directory / "y").symlink_to(elsewhere)
    (text_directory / "z").symlink_to(text_directory)
    assert documents(corpus_of(path=str(text_directory))) == [*TEXTS, "linked"]
    assert documents(corpus_of(path=f"{text_directory}/**/*.txt")) == [*TEXTS, "linked"]


def test_suffixes_in_capitals(tmp_path: Path) -> None:
    write(tmp_path, "jsonl", {"text": ["a"]}).rename(tmp_path / "ROWS.JSONL")
    assert documents(corpus_of(path=str(tmp_path))) == ["a"]
    assert documents(corpus_of(path=str(tmp_path / "ROWS.JSONL"))) == ["a"]


def zstandard(content: bytes) -> bytes:
    return bytes(pa.compress(content, codec="zstd", asbytes=True))


COMPRESSIONS = {"gz": gzip.compress, "BZ2": bz2.compress, "xz": lzma.compress, "zst": zstandard}


@pytest.mark.parametrize("suffix", COMPRESSIONS)
def test_compressed_files(tmp_path: Path, suffix: str) -> None:
    compress: Callable[[bytes], bytes] = COMPRESSIONS[suffix]
    row = json.dumps({"text": "third"}).encode()
    write(tmp_path, "jsonl", {"text": TEXTS})
    (tmp_path / f"rows2.jsonl.{suffix}").write_bytes(compress(row))
    assert documents(corpus_of(path=str(tmp_path))) == [*TEXTS, "third"]
    text = tmp_path / f"a.txt.{suffix}"
    text.write_bytes(compress(TEXTS[1].encode()) + compress(b"second frame"))
    assert documents(corpus_of(path=str(text))) == [TEXTS[1] + "second frame"]
    text.write_bytes(compress(b"word " * 5000)[:-9])
    with pytest.raises(DataError, match=rf"a\.txt\.{suffix} cannot be read as \.{suffix} file"):
        documents(corpus_of(path=str(text)))


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "dataset"])
def test_columns_beside_token_ids_are_not_passed_over(tmp_path: Path, kind: str) -> None:
    alike = {"input_ids": [[1, 2], [3]], "labels": [[1, 2], [3]], "attention_mask": [[1, 1], [1]]}

    def rows(name: str, columns: dict[str, list[Any]]) -> list[list[int]]:
        path = write(tmp_path / name, kind, columns)
        return [row.tolist() for row in corpus_of(path=str(path), format="tokens").token_rows(None)]

    assert rows("alike", alike) == [[1, 2], [3]]
    with pytest.raises(DataError, match=r"(line|row) 2: the column labels differs from input_ids.*data\.factory"):
        rows("labels", alike | {"labels": [[1, 2], [-100]]})
    with pytest.raises(DataError, match=r"(line|row) 1: the column attention_mask leaves tokens out"):
        rows("mask", alike | {"attention_mask": [[1, 0], [1]]})
    with pytest.raises(DataError, match=r"(line|row) 1: the column labels differs from input_ids"):
        rows("classes", alike | {"labels": [1, 0]})
    with pytest.raises(DataError, match=r"(line|row) 1: the column attention_mask holds 1 and no list"):
        rows("flags", alike | {"attention_mask": [1, 1]})


def test_a_lone_surrogate_names_file_and_row(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "\\ud83d\\ude00"}\n{"text": "ab\\ud83d"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: .* lone surrogate, U\+D83D at character 3"):
        documents(corpus_of(path=str(tmp_path)))


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    """A row would have the last."""
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table([["one"], ["two"], [1]], names=["text", "text", "id"]), path)
    says = r"a\.parquet: 2 columns have the name 'text'; write the file with one"
    with pytest.raises(DataError, match=says):
        documents(corpus_of(path=str(path)))
    with pytest.raises(DataError, match=says):
        list(RowReader("parquet", "text", False, None).values(path, "a.parquet", 0))


def test_text_of_parquet_that_is_not_utf_8(tmp_path: Path) -> None:
    column = pa.array([b"ok", b"\xff"], pa.binary()).cast(pa.string(), safe=False)
    parquet.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet cannot be read as Parquet: .*utf-8"):
        documents(corpus_of(path=str(tmp_path)))


@pytest.mark.parametrize("streaming", [False, True])
def test_a_file_name_that_is_not_utf_8_can_be_written_down(tmp_path: Path, streaming: bool) -> None:
    """Checkpoints and reports hold it."""
    name = tmp_path / "a\udcff.jsonl"
    name.write_text('{"text": "one"}\n')
    data = DataSection(path=str(tmp_path), streaming=streaming)
    words = [shard.name for shard in find_shards(data).shards] if streaming else [find_corpus(data).describe()]
    assert [r"a\udcff.jsonl" in word for word in words] == [True]
    with pytest.raises(ConfigError, match=r"output=.*: must be a path in UTF-8"):
        Job(output="a\udcff")
