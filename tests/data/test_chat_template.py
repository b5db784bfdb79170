"""Masks of what is trained on, against transformers' own and against the words of each answer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from shardwise.checkpoint.writing import CHAT_TEMPLATE_FILE, copy_chat_template
from shardwise.data.chat_template import ChatTemplate, TokenizedRow, overlapping, read_template
from shardwise.data.conversations import Conversation, TextPair, chat, preference, prompt_completion
from shardwise.data.tokenizer import TokenizerSource, load_tokenizer
from shardwise.errors import DataError
from shardwise.job.data_section import DataSection
from tests.data.chats import BLOCKS, CHATS, END, FORGETFUL, PLAIN, as_messages, byte_tokenizer

QUESTION, ANSWER, WRONG = as_messages([("user", "2+3?"), ("assistant", "5"), ("assistant", "6")])
DEPTH = 7
THINKS = {"chat_template_kwargs": {"depth": DEPTH}}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def renderer(directory: Path, template: str | None, train_on: str = "assistant") -> ChatTemplate:
    source = TokenizerSource(directory, "")
    return ChatTemplate(load_tokenizer(source), source, template, train_on)


def trained_text(directory: Path, row: TokenizedRow) -> str:
    tokenizer = AutoTokenizer.from_pretrained(str(directory))
    return str(tokenizer.decode(row.ids[row.trained]))


def conversation(number: int) -> Conversation:
    return Conversation("f, line 1", list(as_messages(CHATS[number])))


@pytest.mark.parametrize("template", [PLAIN, BLOCKS])
@pytest.mark.parametrize(
    ("train_on", "expected"),
    [("assistant", f"2{END}8, I think{END}"), ("last_assistant", f"8, I think{END}"), ("all", None)],
)
def test_only_answers_are_trained_on(directory: Path, template: str, train_on: str, expected: str | None) -> None:
    (row,) = renderer(directory, template, train_on).tokenized([conversation(1)])
    whole = f"[system]Be brief.{END}[user]1+1?{END}[assistant]2{END}[user]And 4+4?{END}[assistant]8, I think{END}"
    assert AutoTokenizer.from_pretrained(str(directory)).decode(row.ids) == whole
    assert trained_text(directory, row) == (expected or whole)


def test_generation_blocks_give_transformers_own_mask(directory: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(directory))
    for turns in CHATS:
        (row,) = renderer(directory, BLOCKS).tokenized([Conversation("f", list(as_messages(turns)))])
        theirs = tokenizer.apply_chat_template(
            as_messages(turns), chat_template=BLOCKS, return_assistant_tokens_mask=True, return_dict=True
        )
        assert row.ids.tolist() == theirs["input_ids"]
        assert row.trained.tolist() == [bool(value) for value in theirs["assistant_masks"]]


def test_a_prompt_is_never_trained_on(directory: Path) -> None:
    messages = as_messages([("user", "1?"), ("assistant", "2"), ("user", "3?"), ("assistant", "4")])
    for template in (PLAIN, BLOCKS):
        (row,) = renderer(directory, template, "completion").tokenized(
            [Conversation("f", list(messages), None, prompt=3)]
        )
        assert trained_text(directory, row) == f"4{END}"


def test_a_completion_of_text_has_an_end_that_is_trained_on(directory: Path) -> None:
    pairs = [TextPair("f", "2+3=", "5"), TextPair("g", "ü=", f"u{END}")]
    first, second = renderer(directory, None, "completion").tokenized(pairs)
    assert trained_text(directory, first) == f"5{END}" and trained_text(directory, second) == f"u{END}"
    assert not first.trained[:4].any() and len(second.ids) == 5
    (whole,) = renderer(directory, None, "all").tokenized(pairs[:1])
    assert whole.trained.all()


@pytest.mark.parametrize(
    "row",
    [
        chat("f", {"messages": [QUESTION, ANSWER], **THINKS}),
        prompt_completion("f", {"prompt": [QUESTION], "completion": [ANSWER], **THINKS}),
        preference("f", {"prompt": [QUESTION], "chosen": [ANSWER], "rejected": [WRONG], **THINKS}).chosen,
        preference("f", {"chosen": [QUESTION, ANSWER], "rejected": [QUESTION, WRONG], **THINKS}).chosen,
    ],
)
def test_a_row_says_what_else_its_template_is_given(directory: Path, row: Conversation) -> None:
    """As TRL: every rendering has it, that of the prompt too."""
    template = PLAIN.replace("]' + m", "]' + depth ~ m") + "{% if add_generation_prompt %}{{ depth }}{% endif %}"
    (whole,) = renderer(directory, template).tokenized([row])
    tokenizer = AutoTokenizer.from_pretrained(str(directory))
    assert tokenizer.decode(whole.ids) == f"[user]{DEPTH}2+3?{END}[assistant]{DEPTH}5{END}"
    assert trained_text(directory, whole) == f"5{END}"


def test_a_template_that_is_not_prefix_stable_is_refused(directory: Path) -> None:
    with pytest.raises(DataError, match=r"f, line 1: the chat template is not prefix-stable.*'~2.*last_assistant"):
        renderer(directory, FORGETFUL).rendered(conversation(1))
    (row,) = renderer(directory, FORGETFUL, "last_assistant").tokenized([conversation(1)])
    assert trained_text(directory, row) == f"~8, I think{END}"


def test_refused_roles_and_missing_templates(directory: Path, tmp_path: Path) -> None:
    strict = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('begin with a user') }}{% endif %}" + PLAIN
    with pytest.raises(
        DataError, match=r"f, line 1: the chat template refuses the roles system, user.*begin with a user"
    ):
        renderer(directory, strict).rendered(conversation(1))
    with pytest.raises(DataError, match=r"the chat template of data.chat_template is no Jinja, line 1: .*; mend it"):
        renderer(directory, "{% for m in messages %}").rendered(conversation(0))
    with pytest.raises(DataError, match=r"has no chat template; set data.chat_template"):
        renderer(directory, None).rendered(conversation(0))
    with pytest.raises(DataError, match="is no file"):
        read_template(DataSection(chat_template=str(tmp_path / "missing.jinja")))


def test_a_byte_order_mark_is_no_part_of_a_template(tmp_path: Path) -> None:
    """Each row would begin with it, in training and where the exported template is rendered."""
    (tmp_path / "t.jinja").write_text(PLAIN, encoding="utf-8-sig")
    assert read_template(DataSection(chat_template=str(tmp_path / "t.jinja"))) == PLAIN
    copy_chat_template(str(tmp_path / "t.jinja"), tmp_path)
    assert (tmp_path / CHAT_TEMPLATE_FILE).read_text(encoding="utf-8") == PLAIN


def test_an_answer_is_found_in_tokens_that_cross_its_edge() -> None:
    offsets = [(0, 2), (2, 5), (5, 5), (5, 6), (6, 9)]
    assert overlapping(offsets, [(4, 6)]).tolist() == [False, True, True, True, False]
    assert np.array_equal(overlapping(offsets, []), np.zeros(5, dtype=bool))
