"""Given, found and trained tokenizers, and how they fit the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from shardwise.data.corpus import find_corpus
from shardwise.data.tokenizer import (
    TokenizerSource,
    check_vocabulary,
    encode,
    facts_of,
    find_tokenizer,
    load_tokenizer,
)
from shardwise.errors import DataError
from shardwise.job.schema import Job
from tests.data.conftest import TEXTS, JobMaker


def find(job: Job, model_vocabulary: int | None = None, said: list[str] | None = None) -> TokenizerSource | None:
    return find_tokenizer(job, [find_corpus(job.data)], model_vocabulary, (said if said is not None else []).append)


def trained(job: Job) -> Path:
    source = find(job)
    assert source is not None
    return source.directory


def test_trained_tokenizer_opens_and_round_trips(text_directory: Path, make_job: JobMaker) -> None:
    directory = trained(make_job(path=str(text_directory)))
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    for ids, text in zip(
        encode(tokenizer, [*TEXTS, "never seen: ☃\r\n\t"]), [*TEXTS, "never seen: ☃\r\n\t"], strict=True
    ):
        assert tokenizer.decode(ids) == text
    facts = facts_of(tokenizer)
    assert (facts.vocabulary_size, facts.eos_id, facts.mask_id, facts.special_ids) == (300, 0, None, (0,))
    assert len(encode(tokenizer, TEXTS)[0]) < len(TEXTS[0]) / 2


def test_training_is_deterministic_and_cached(text_directory: Path, make_job: JobMaker, tmp_path: Path) -> None:
    job = make_job(path=str(text_directory))
    first = trained(job)
    again: list[str] = []
    assert find(job, said=again) is not None and again == []
    second = trained(make_job(path=str(text_directory), cache_directory=str(tmp_path / "other")))
    assert first != second
    assert (first / "tokenizer.json").read_bytes() == (second / "tokenizer.json").read_bytes()


def test_masked_lm_gets_mask_and_padding(text_directory: Path, make_job: JobMaker) -> None:
    directory = trained(make_job(task="masked_lm", path=str(text_directory)))
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    assert (tokenizer.mask_token, tokenizer.pad_token, tokenizer.eos_token) == ("<mask>", "<pad>", "<|endoftext|>")
    assert facts_of(tokenizer).special_ids == (0, 1, 2)


def test_given_directory_and_model_directory_win(text_directory: Path, make_job: JobMaker) -> None:
    directory = trained(make_job(path=str(text_directory)))
    given = find(make_job(path=str(text_directory), tokenizer=str(directory)))
    models = find(make_job(path=str(text_directory), model={"path": str(directory)}))
    assert given is not None and models is not None
    assert given.directory == models.directory == directory


def test_another_chat_template_makes_another_tokenizer(text_directory: Path, make_job: JobMaker) -> None:
    """Rows that were tokenized with a template that was changed are not read again."""
    directory = trained(make_job(path=str(text_directory)))
    templates = directory / "additional_chat_templates"
    templates.mkdir()
    identities = set()
    for text in ("{{ tools }}", "{{ tools }} and more"):
        (templates / "tool_use.jinja").write_text(text)
        source = find(make_job(path=str(text_directory), tokenizer=str(directory)))
        assert source is not None
        identities.add(source.identity)
    assert len(identities) == 2


def test_pretrained_weights_get_no_new_tokenizer(text_directory: Path, make_job: JobMaker, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no tokenizer.*set data\.tokenizer"):
        find(make_job(path=str(text_directory), model={"path": str(tmp_path)}))


def test_a_bert_tokenizer_packs_without_its_own_template(tmp_path: Path) -> None:
    words = {"[CLS]": 0, "[SEP]": 1, "[MASK]": 2, "[UNK]": 3, "cat": 4, "dog": 5}
    inner = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=[("[CLS]", 0), ("[SEP]", 1)])
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]", "unk_token": "[UNK]"}
    PreTrainedTokenizerFast(tokenizer_object=inner, **names).save_pretrained(str(tmp_path))
    tokenizer = load_tokenizer(TokenizerSource(tmp_path, ""))
    assert tokenizer("cat dog").input_ids == [0, 4, 5, 1]
    assert encode(tokenizer, ["cat dog", "dog"]) == [[4, 5], [5]]
    facts = facts_of(tokenizer)
    assert (facts.vocabulary_size, facts.eos_id, facts.mask_id, facts.special_ids) == (6, 1, 2, (0, 1, 2, 3))


BAD = {
    r"data.vocabulary_size=200 is below 257: all bytes and <\|endoftext\|>; use 257": {"vocabulary_size": 200},
    r"data.vocabulary_size=400 is more than the model's vocabulary_size=350; use 350": {"vocabulary_size": 400},
    r"data.tokenizer='.*' is not a directory": {"tokenizer": "/nowhere"},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_settings(text_directory: Path, make_job: JobMaker, message: str) -> None:
    data: dict[str, Any] = BAD[message]
    with pytest.raises(DataError, match=message):
        find(make_job(path=str(text_directory), **data), 350)


def test_bad_directories(text_directory: Path, make_job: JobMaker) -> None:
    with pytest.raises(DataError, match="holds no tokenizer"):
        find(make_job(path=str(text_directory), tokenizer=str(text_directory)))
    (text_directory / "tokenizer.json").write_text('{"model": ')
    source = find(make_job(path=str(text_directory), tokenizer=str(text_directory)))
    assert source is not None
    with pytest.raises(DataError, match=r"data\.tokenizer='.*': the tokenizer .* cannot be opened: .*; save it again"):
        load_tokenizer(source)
    (text_directory / "tokenizer.json").write_text("")
    with pytest.raises(DataError, match=r"data\.tokenizer='.*': its tokenizer\.json is empty; save it again"):
        find(make_job(path=str(text_directory), tokenizer=str(text_directory)))


def test_vocabulary_must_fit_the_model() -> None:
    check_vocabulary(300, 300, "there")
    with pytest.raises(DataError, match="in there has 301 tokens, the model's vocabulary_size is 300"):
        check_vocabulary(301, 300, "there")


def test_errors_of_the_corpus_pass_through_training(tmp_path: Path, make_job: JobMaker) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match="not valid UTF-8"):
        find(make_job(path=str(tmp_path / "a.txt")))
    assert not list((tmp_path / "cache" / "tokenizers").glob("*building*"))
