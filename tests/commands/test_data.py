"""`shardwise data`: what is shown (text, marks of what is trained on, padding), and what is not tokenized ahead."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import chdir
from pathlib import Path

import pytest
import yaml

from shardwise.commands import data_prepare
from shardwise.commands.cli import main
from shardwise.data.token_data import TokenData
from shardwise.job.schema import Job
from shardwise.job.sources import job_to_yaml
from tests.data.chats import BLOCKS, CHATS, END, PLAIN, as_messages, chat_job

MODEL = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "n_positions": 64, "vocab_size": 257}


def job_file(tmp_path: Path, template: str | dict[str, str] = PLAIN, **data: object) -> str:
    job = chat_job(tmp_path, [{"messages": as_messages(CHATS[4])}] * 6, template, **data)
    job = job.model_copy(update={"model": job.model.model_copy(update={"config": MODEL})})
    path = tmp_path / "job.yaml"
    path.write_text(job_to_yaml(job))
    return str(path)


def test_text_is_shown_with_what_is_trained_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "show", job_file(tmp_path), "--samples", "1"]) == 0
    row = f"[user]6+1?{END}[assistant]«7{END}»"
    assert capsys.readouterr().out.splitlines() == [
        "sample 0: 64 positions, 4 trained on, 16 padding",
        *("-- positions 0-23, 2 trained on", row, "-- positions 24-47, 2 trained on", row),
        "-- positions 48-63, padding",
    ]
    assert main(["data", "show", job_file(tmp_path, packing=False, sequence_length=24), "--samples", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["-- positions 0-23, 2 trained on", row]


def test_tokens_are_shown_a_line_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "show", job_file(tmp_path), "--samples", "1", "--tokens"]) == 0
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    cells = [line for line in lines if line]
    assert len(cells) == 64
    assert [line[0] for line in cells if line[5] == "yes"] == ["22", "23", "46", "47"]
    assert cells[22][4] == "'7'" and cells[24][1:3] == ["1", "0"] and cells[48][1] == "padding"


def pairs_file(tmp_path: Path, *rejected: str) -> str:
    rows = [{"prompt": "6+1?", "chosen": "7", "rejected": text} for text in rejected]
    job = chat_job(tmp_path, rows, sequence_length=16)
    job = job.model_copy(update={"model": job.model.model_copy(update={"config": MODEL})})
    (tmp_path / "job.yaml").write_text(job_to_yaml(job))
    return str(tmp_path / "job.yaml")


def test_pairs_are_shown_chosen_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "show", pairs_file(tmp_path, *["42"] * 6), "--samples", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        *("-- chosen, positions 0-5, 2 trained on", f"6+1?«7{END}»"),
        *("-- rejected, positions 6-12, 3 trained on", f"6+1?«42{END}»"),
        "-- positions 13-15, padding",
    ]


def test_rows_are_left_for_other_machines_with_their_template(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.jinja").write_text(PLAIN.replace("'['", "'<'").replace("[assistant]", "<assistant]"))
    path, made = job_file(tmp_path, chat_template=str(tmp_path / "own.jinja")), tmp_path / "made"
    assert main(["data", "prepare", path, "--output", str(made)]) == 0
    assert capsys.readouterr().out == f"6 rows, 144 tokens in {made}\n"
    (tmp_path / "rows.jsonl").unlink()
    keys = ["--data.path", str(made), "--samples", "1"]
    assert main(["data", "show", path, *keys, "--data.chat_template", str(made / "chat_template.jinja")]) == 0
    assert f"<user]6+1?{END}<assistant]«7{END}»" in capsys.readouterr().out
    (tmp_path / "own.jinja").write_text(PLAIN)
    assert main(["data", "show", path, *keys]) == 2
    assert f"set data.chat_template to {made / 'chat_template.jinja'}" in capsys.readouterr().err.replace("\n", " ")


def test_one_that_writes_a_directory_takes_nothing_from_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second begins while the first writes, and fails."""
    path, made, write = job_file(tmp_path), tmp_path / "made", data_prepare._write
    command = ["data", "prepare", path, "--output", str(made)]

    def fail(job: Job, data: TokenData, target: Path) -> None:
        raise OSError("no space left")

    def write_beside(job: Job, data: TokenData, target: Path) -> None:
        monkeypatch.setattr(data_prepare, "_write", fail)
        assert main(command) == 2
        write(job, data, target)

    monkeypatch.setattr(data_prepare, "_write", write_beside)
    assert main(command) == 0
    assert (made / "tokens.arrow").is_file() and not list(tmp_path.glob(".made*"))
    assert made.stat().st_mode == (tmp_path / "tokenizer").stat().st_mode


def test_a_tokenizer_with_several_templates_is_left_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, made = job_file(tmp_path, template={"default": PLAIN, "tool_use": BLOCKS}), tmp_path / "made"
    assert main(["data", "prepare", path, "--output", f"file://{made}"]) == 0
    assert (made / "tokenizer" / "additional_chat_templates" / "tool_use.jinja").read_text() == BLOCKS
    shutil.rmtree(tmp_path / "tokenizer")
    keys = ["--data.path", f"file://{made}", "--data.tokenizer", str(made / "tokenizer"), "--samples", "1"]
    assert main(["data", "show", path, *keys]) == 0
    assert f"[user]6+1?{END}[assistant]«7{END}»" in capsys.readouterr().out


SOURCES = {"sources": [{"path": "a.jsonl"}, {"path": "b.jsonl"}]}


@pytest.mark.parametrize(
    ("data", "options", "says"),
    [
        (SOURCES, ["--output", "made"], "prepare each by itself"),
        ({"path": "a.jsonl", "streaming": True}, [], "leave it out to tokenize now"),
        (
            {"sources": [{"path": "a.jsonl", "streaming": True, "weight": 1}, {"path": "b.jsonl", "weight": 1}]},
            [],
            "streaming of data.sources, a, tokenizes",
        ),
    ],
)
def test_what_is_not_tokenized_ahead_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], data: dict[str, object], options: list[str], says: str
) -> None:
    job = tmp_path / "refused.yaml"
    job.write_text(yaml.safe_dump({"data": data}))
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text('{"text": "some words"}\n')
    with chdir(tmp_path):
        assert main(["data", "prepare", str(job), *options]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("command", ["show", "stats", "prepare"])
@pytest.mark.parametrize(
    ("job", "says"),
    [
        ({"data": {"factory": "a:b"}}, "data.factory='a:b' gives tensors, "),
        (
            {"model": {"task": "speech_seq2seq"}, "data": {"path": "rows.jsonl"}},
            "model.task='speech_seq2seq' makes tensors, ",
        ),
    ],
)
def test_what_has_no_tokens_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, job: dict[str, object], says: str
) -> None:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    (tmp_path / "rows.jsonl").write_text('{"audio": "a.wav", "text": "some words"}\n')
    with chdir(tmp_path):
        assert main(["data", command, "job.yaml"]) == 2
    assert says in capsys.readouterr().err.replace("\n", " ")


def test_a_pair_is_one_document_in_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What two pairs share by half is there once; a pair is as long as both of its completions."""
    job = pairs_file(tmp_path, "42", "42", "6", "a word too long")
    assert main(["data", "stats", job, "--json"]) == 0
    (part,) = json.loads(capsys.readouterr().out)
    assert (part["documents"], part["duplicates"], part["lengths"]["50"]) == (4, 1, 13)
    assert part["longer_share"] == part["left_out_share"] == 0.25


def test_a_corpus_in_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Six equal rows of 24 tokens: what is printed as JSON is what the table shows."""
    job = job_file(tmp_path)
    assert main(["data", "stats", job, "--json"]) == 0
    (part,) = json.loads(capsys.readouterr().out)
    assert (part["documents"], part["tokens"], part["duplicates"], part["cut_share"]) == (6, 144, 5, 0.0)
    assert part["vocabulary_seen"] == len(set("[user]6+1?[assistant]7")) + 1  # and the end
    assert main(["data", "stats", job]) == 0
    rows = dict(re.findall(r"│ (\S[^│]*?) +│ (\S[^│]*?) +│", capsys.readouterr().out))
    assert rows["documents"] == "6" and rows["tokens"] == "144" and rows["duplicates"] == "5 (83.3%)"
    assert rows["longer than 64"] == "0.0%" and rows["lengths, percentiles"].endswith("100: 24")
    assert rows["most frequent"].startswith("'s' 16.7%")
