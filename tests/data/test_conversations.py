"""Rows of conversations and pairs: formats by columns, ShareGPT, tools, and what is refused with file and row."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset

from shardwise.data.conversations import Conversation, TextPair, chat, preference, prompt_completion
from shardwise.data.corpus import data_format, find_corpus, with_format
from shardwise.data.loader import training_index
from shardwise.data.packed_rows import PackedRows
from shardwise.data.prepare import prepare
from shardwise.errors import ConfigError, DataError
from shardwise.job.data_section import DataSection
from shardwise.job.schema import Job
from shardwise.testing.oracle_rows import RowSource
from tests.data.chats import CHATS, PLAIN, as_messages, chat_job, write_rows

QUESTION = {"role": "user", "content": "2+3?"}
ANSWER = {"role": "assistant", "content": "5"}
WRONG = {"role": "assistant", "content": "6"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
ROWS: dict[str, dict[str, Any]] = {
    "chat": {"messages": [QUESTION, ANSWER]},
    "prompt_completion": {"prompt": "2+3?", "completion": "5"},
    "preference": {"prompt": [QUESTION], "chosen": [ANSWER], "rejected": [WRONG]},
}


@pytest.mark.parametrize("name", ROWS)
def test_the_format_is_found_from_columns_in_every_container(name: str, tmp_path: Path) -> None:
    table = pa.Table.from_pylist([ROWS[name]] * 2)
    pq.write_table(table, tmp_path / "rows.parquet")
    Dataset.from_list([ROWS[name]] * 2).save_to_disk(str(tmp_path / "saved"))
    write_rows(tmp_path / "rows.jsonl", [ROWS[name]] * 2)
    for place in ("rows.parquet", "rows.jsonl", "saved"):
        data = with_format(Job(data={"path": str(tmp_path / place)})).data
        assert data.format == name
        rows = list(find_corpus(data).rows(list(ROWS[name])))
        assert [row for _, row in rows] == [ROWS[name]] * 2
        assert place in rows[1][0]


def test_documents_stay_documents_and_both_kinds_of_columns_are_refused(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"text": "a", "prompt": "b"}])
    job = Job(data={"path": str(path)})
    assert data_format(job.data) == "jsonl" and with_format(job) is job
    write_rows(path, [{"text": "a", "messages": [QUESTION, ANSWER]}])
    with pytest.raises(ConfigError, match=r"set data.format to jsonl for the documents, or to chat"):
        data_format(job.data)
    assert data_format(DataSection(path=str(path), format="jsonl")) == "jsonl"


def test_sharegpt_tools_and_what_parquet_adds() -> None:
    row = {
        "system": "Be brief.",
        "conversations": [
            {"from": "human", "value": "2+3?", "weight": None},
            {"from": "function_call", "value": "add(2, 3)"},
            {"from": "observation", "value": "5"},
            {"from": "gpt", "value": "5"},
        ],
        "tools": json.dumps([TOOL]),
    }
    conversation = chat("f, line 1", row)
    assert [message["role"] for message in conversation.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert conversation.messages[1] == QUESTION and conversation.tools == [TOOL]
    parts = {"role": "user", "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "3?"}]}
    assert chat("f", {"messages": [parts, ANSWER]}).messages == [QUESTION, ANSWER]


def test_nulls_are_kept_where_somebody_wrote_them(tmp_path: Path) -> None:
    """An argument of a tool may be null; Arrow gives every object of a file the keys of all."""
    calls = [{"function": {"name": "f", "arguments": arguments}} for arguments in ({"a": None}, {"b": 1})]
    messages = [QUESTION, *({"role": "assistant", "content": None, "tool_calls": [call]} for call in calls)]
    write_rows(tmp_path / "rows.jsonl", [{"messages": messages}])
    pq.write_table(pa.Table.from_pylist([{"messages": messages}]), tmp_path / "rows.parquet")
    found = {}
    for name in ("rows.jsonl", "rows.parquet"):
        ((where, row),) = find_corpus(with_format(Job(data={"path": str(tmp_path / name)})).data).rows(["messages"])
        said = chat(where, row).messages[1:]
        found[name] = [message["tool_calls"][0]["function"]["arguments"] for message in said]
        assert all(message["content"] == "" for message in said)
    assert found == {"rows.jsonl": [{"a": None}, {"b": 1}], "rows.parquet": [{}, {"b": 1}]}


def test_pairs_are_texts_or_messages() -> None:
    assert prompt_completion("f", ROWS["prompt_completion"]) == TextPair("f", "2+3?", "5")
    row = {"prompt": [QUESTION], "completion": [ANSWER]}
    assert prompt_completion("f", row) == Conversation("f", [QUESTION, ANSWER], None, prompt=1)
    explicit = preference("f", ROWS["preference"])
    implicit = preference("f", {"chosen": [QUESTION, ANSWER], "rejected": [QUESTION, WRONG], "prompt": "2+3?"})
    assert explicit == implicit
    assert explicit.rejected == Conversation("f", [QUESTION, WRONG], None, prompt=1)
    texts = preference("f", {"prompt": "2+3?", "chosen": "5", "rejected": "6"})
    assert texts.chosen == TextPair("f", "2+3?", "5")


def test_a_prompt_and_a_system_column_are_part_of_every_format() -> None:
    """Answers that are conversations may go on from the prompt, or hold it."""
    before = {"role": "system", "content": "Be brief."}
    whole = preference("f", {"chosen": [before, QUESTION, ANSWER], "rejected": [before, QUESTION, WRONG]})
    answers = {"chosen": [QUESTION, ANSWER], "rejected": [QUESTION, WRONG]}
    assert preference("f", {"prompt": [before], **answers}) == whole
    assert preference("f", {"prompt": [QUESTION], "system": "Be brief.", **answers}) == whole
    assert preference("f", {**ROWS["preference"], "system": "Be brief."}) == whole
    assert preference("f", {"prompt": [QUESTION], **answers}) == preference("f", ROWS["preference"])
    row = {"prompt": [QUESTION], "completion": [ANSWER], "system": "Be brief."}
    assert prompt_completion("f", row) == Conversation("f", [before, QUESTION, ANSWER], None, prompt=2)


class BadRow(NamedTuple):
    """A row that cannot be used: its format, what is said of it, and what to do."""

    format: str
    problem: str
    fix: str
    row: dict[str, Any]


def bad_messages(problem: str, fix: str, *messages: Any, **columns: Any) -> BadRow:
    return BadRow("chat", problem, fix, {"messages": list(messages), **columns})


BAD_ROWS = [
    bad_messages("no messages in messages, found []", "give a list of objects with role and content"),
    BadRow("chat", "no messages; data.format=chat", "fill it, or remove the row", {"messages": None}),
    bad_messages("message 1 of messages: expected an object", "give one, or remove the row", "5"),
    bad_messages(
        "message 1 of messages: unknown role 'asistant'", "'assistant'?", {"role": "asistant", "content": "5"}
    ),
    bad_messages("message 1 of messages: unknown role 5", "Known: ", {"role": 5, "content": "5"}),
    bad_messages("message 2 of messages: an empty content", "remove the row", QUESTION, ANSWER | {"content": " "}),
    bad_messages("message 1 of messages: no content, its keys are ['role']", "give it content", {"role": "user"}),
    bad_messages("parts that are no text", "leave them out", QUESTION | {"content": [{"type": "image"}]}, ANSWER),
    bad_messages("expected text, found int 5", "write it as text", QUESTION | {"content": 5}, ANSWER),
    bad_messages("system: expected text, found list", "write it as text", QUESTION, ANSWER, system=["Be brief."]),
    bad_messages("weight=0", "remove the row", QUESTION, ANSWER | {"weight": 0}),
    bad_messages("tools is a text, but not valid JSON", "write a list of JSON schemas", QUESTION, ANSWER, tools="add"),
    bad_messages(
        "tools is a text, but not valid JSON (maximum recursion",
        "or leave tools out",
        QUESTION,
        ANSWER,
        tools="[" * 200_000,
    ),
    bad_messages("tools must be a list of JSON schemas", "or leave tools out", QUESTION, ANSWER, tools={"name": "add"}),
    bad_messages(
        "chat_template_kwargs must be an object", "or leave it out", QUESTION, ANSWER, chat_template_kwargs=["thinking"]
    ),
    BadRow(
        "preference",
        "chat_template_kwargs holds tools, add_generation_prompt",
        "messages and tools are columns",
        {**ROWS["preference"], "chat_template_kwargs": {"add_generation_prompt": True, "tools": [], "thinking": 1}},
    ),
    BadRow("prompt_completion", "an empty completion", "remove the row", {"prompt": "2+3?", "completion": ""}),
    BadRow("prompt_completion", "prompt is '2+3?'", "both as texts", {"prompt": "2+3?", "completion": [ANSWER]}),
    BadRow("prompt_completion", "no completion", "fill it", {"prompt": "2+3?", "completion": None}),
    BadRow("preference", "no rejected", "fill it, or remove the row", {"prompt": "2+3?", "chosen": "5"}),
    BadRow("preference", "no prompt", "fill it, or remove the row", {"chosen": "5", "rejected": "6"}),
    BadRow(
        "preference",
        "the text in prompt stands in none of the messages",
        "give it as messages, or leave it out",
        {"prompt": "4+5?", "chosen": [QUESTION, ANSWER], "rejected": [QUESTION, WRONG]},
    ),
    BadRow(
        "prompt_completion",
        "system stands beside a prompt that is a text",
        "give messages",
        {"prompt": "2+3?", "completion": "5", "system": "Be brief."},
    ),
    BadRow(
        "preference", "are equal", "remove the row", {"prompt": [QUESTION], "chosen": [ANSWER], "rejected": [ANSWER]}
    ),
    BadRow(
        "preference",
        "share 0 of their first messages",
        "give both a prompt",
        {"chosen": [QUESTION, ANSWER], "rejected": [QUESTION | {"content": "4?"}, WRONG]},
    ),
]


@pytest.mark.parametrize("bad", BAD_ROWS, ids=lambda bad: bad.problem)
def test_bad_rows_are_refused_by_file_and_row_with_a_fix(bad: BadRow) -> None:
    read = {"chat": chat, "prompt_completion": prompt_completion, "preference": preference}[bad.format]
    with pytest.raises(DataError) as refused:
        read("rows.jsonl, line 7", bad.row)
    place, said = str(refused.value)[:18], str(refused.value)[18:]
    assert place == "rows.jsonl, line 7"
    assert bad.fix in said.partition(bad.problem)[2], said


def test_rows_without_text_are_named_as_rows(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"messages": []}])
    with pytest.raises(DataError, match=r"is empty: no row has any text \(chat: "):
        prepare(with_format(Job(data={"path": str(path)})))


def test_what_a_row_gives_its_template_is_read_with_it(tmp_path: Path) -> None:
    plain = {"messages": [QUESTION, ANSWER]}
    thinking = plain | {"chat_template_kwargs": {"depth": 7}}
    template = PLAIN.replace("]' + m", "]' ~ depth ~ m")
    job = with_format(chat_job(tmp_path, [thinking] * 3, template, packing=False))
    given, counters = prepare(job), range(2)
    assert isinstance(given.train, PackedRows)
    own = given.train.batch([training_index(given.train, 0, counter) for counter in counters], counters, 0)
    judged = RowSource(job, str(job.data.tokenizer)).rows(counters)
    assert torch.equal(own.inputs["input_ids"], judged.inputs["input_ids"])
    without = prepare(with_format(chat_job(tmp_path, [plain] * 3, template)))
    assert given.tokens == without.tokens + 3 * len("77")  # before each question and each answer


@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_pairs_of_a_table_are_those_of_json_lines(tmp_path: Path, suffix: str) -> None:
    pairs = [{"prompt": 'What is "2+3",\nplease?', "completion": "5"}, {"prompt": "6,1?", "completion": "7"}] * 2
    with (tmp_path / f"rows{suffix}").open("w", newline="") as stream:
        table = csv.DictWriter(stream, list(pairs[0]), delimiter="\t" if suffix == ".tsv" else ",")
        table.writeheader()
        table.writerows(pairs)
    job = with_format(chat_job(tmp_path, pairs, PLAIN))
    of_table = with_format(job.model_copy(update={
        "data": job.data.model_copy(update={"path": str(tmp_path / f"rows{suffix}"), "format": "auto"})
    }))  # fmt: skip
    assert of_table.data.format == job.data.format == "prompt_completion"
    counters = range(2)
    judged = RowSource(of_table, str(of_table.data.tokenizer)).rows(counters)
    for one in (job, of_table):
        given = prepare(one)
        assert isinstance(given.train, PackedRows)
        own = given.train.batch([training_index(given.train, 0, counter) for counter in counters], counters, 0)
        assert torch.equal(own.inputs["input_ids"], judged.inputs["input_ids"])


def test_a_bad_row_ends_the_preparation_with_its_line(tmp_path: Path) -> None:
    rows = [{"messages": as_messages(turns)} for turns in CHATS]
    rows[3] = {"messages": [QUESTION, {"role": "assistant", "content": ""}]}
    with pytest.raises(DataError, match=r"rows.jsonl, line 4, message 2 of messages: an empty content.*remove the row"):
        prepare(with_format(chat_job(tmp_path, rows)))
