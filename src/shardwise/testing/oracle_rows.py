"""The oracle's own reader of conversations and pairs: samples of a step straight from the user's files.

Written from the definitions in `data/packed_rows.py` and `data/chat_template.py`, not with their code: files are parsed
again, text and ids come from the tokenizer's own `apply_chat_template`, masks from it or character by character, and
rows are put into sequences in the plainest way. Shared is the list of files.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
import xxhash
from datasets import DatasetDict, load_from_disk
from transformers import AutoTokenizer

from shardwise.data.compressed import content_suffix, opened_text
from shardwise.data.corpus import find_corpus
from shardwise.job.schema import Job
from shardwise.testing.oracle_corpus import is_kept
from shardwise.testing.oracle_data import NOT_COUNTED, Places, Rows, mixed

Row = tuple[list[int], list[bool]]  # token ids, and which are trained on
Sample = list[Row]  # one row; of preferences that are trained on as such two, chosen and rejected
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "observation": "tool"}
ROLES |= {"function_call": "assistant", "function_response": "tool"}


class RowSource:
    """Rows of conversations and pairs, packed or one a sequence; those that train."""

    validation_size = 0

    def __init__(self, job: Job, tokenizer_directory: str) -> None:
        self.job, self.length, self.seed = job, job.data.sequence_length, job.training.seed
        self.tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer_directory)
        template = job.data.chat_template
        self.template = None if template is None else Path(template).read_text(encoding="utf-8-sig")
        samples = [self._sample(row) for row in _rows_of_files(job)][: job.data.max_documents]
        training = self._training_samples(list(filter(self._stays, samples)))
        self.sequences = self._placed([self._cut(sample) for sample in training])
        self.places = Places(self.seed, len(self.sequences))

    def _sample(self, row: dict[str, Any]) -> Sample:
        if not self.job.reads_pairs:
            return [self._tokenized(row, "chosen", "rejected")]
        return [self._tokenized(row, "chosen", "rejected"), self._tokenized(row, "rejected", "chosen")]

    def _cut(self, sample: Sample) -> Sample:
        """The sample, or as much of it as a sequence holds where it may be cut."""
        if not self.job.data.truncation:
            return sample
        room = [self.length]
        if len(sample) == 2:
            sizes = [len(ids) for ids, _ in sample]
            room = [max(self.length // 2, self.length - other) for other in reversed(sizes)]
        return [(ids[:most], trained[:most]) for (ids, trained), most in zip(sample, room, strict=True)]

    def _stays(self, sample: Sample) -> bool:
        cut = self._cut(sample)
        is_alike = len(cut) == 2 and cut[0][0] == cut[1][0]
        return all(any(trained[1:]) for _, trained in cut) and _size(cut) <= self.length and not is_alike

    def rows(self, counters: Sequence[int]) -> Rows:
        """Return the samples of these counters."""
        chosen = [self.sequences[self.places.training(counter)] for counter in counters]
        stacked = {
            key: torch.tensor([self._columns(sequence)[key] for sequence in chosen])
            for key in ("input_ids", "labels", "position_ids", "documents", "filled")
        }
        labels, documents, filled = stacked.pop("labels"), stacked.pop("documents"), stacked.pop("filled").bool()
        if self.job.reads_pairs:
            return Rows(stacked, labels, list(counters), documents, documents, filled)
        if self.job.data.packing:
            return Rows(stacked, labels, list(counters), documents, filled=filled)
        del stacked["position_ids"]
        return Rows(stacked, labels, list(counters), filled=filled)

    def _columns(self, sequence: list[Row]) -> dict[str, list[int]]:
        columns: dict[str, list[int]] = {name: [] for name in ("input_ids", "labels", "position_ids", "documents")}
        padding = next((i for i in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id) if i is not None), 0)
        room = self.length - sum(len(ids) for ids, _ in sequence)
        filled = [*sequence, ([padding] * room, [False] * room)]
        for number, (ids, trained) in enumerate(filled):
            targets = [token if counts else NOT_COUNTED for token, counts in zip(ids[1:], trained[1:], strict=True)]
            columns["input_ids"] += ids
            columns["labels"] += [*targets, NOT_COUNTED][: len(ids)]
            columns["position_ids"] += range(len(ids))
            columns["documents"] += [number] * len(ids)
        columns["filled"] = [int(place >= self.length - room) for place in range(self.length)]
        return columns

    def _training_samples(self, samples: list[Sample]) -> list[Sample]:
        """The samples that are not held out, by ascending draw, which is of the first row, whole."""
        first = [np.array(sample[0][0], "<i4").tobytes() for sample in samples]
        draws = [mixed(mixed(self.seed) ^ xxhash.xxh3_64_intdigest(ids)) for ids in first]
        ranked = sorted(range(len(samples)), key=lambda number: (draws[number], number))
        held_out = max(1, int(len(samples) * self.job.data.validation_fraction))
        if self.job.data.validation_split == "place":
            return [samples[number] for number in ranked if number < len(samples) - held_out]
        return [samples[number] for number in ranked[held_out:]]

    def _placed(self, samples: list[Sample]) -> list[list[Row]]:
        """The rows of each sequence: each sample in the first that has room."""
        sequences: list[list[Row]] = []
        for sample in samples:
            used = [_size(sequence) for sequence in sequences] if self.job.data.packing else []
            place = next((i for i, tokens in enumerate(used) if tokens + _size(sample) <= self.length), len(sequences))
            if place == len(sequences):
                sequences.append([])
            sequences[place] += sample
        return sequences

    # --- tokens and masks

    def _tokenized(self, row: dict[str, Any], side: str, other: str) -> Row:
        """A row's tokens; of preferences those of the completion in column `side`."""
        after = row[side] if self.job.data.format == "preference" else row.get("completion")
        if isinstance(after, str):
            return self._text_pair(row["prompt"], after)
        prompt, messages = _messages_of(row, after, row.get(other, []))
        tools = json.loads(row["tools"]) if isinstance(row.get("tools"), str) else row.get("tools")
        return self._conversation(messages, prompt, {"tools": tools or None, **(row.get("chat_template_kwargs") or {})})

    def _text_pair(self, prompt: str, completion: str) -> Row:
        encoded = self.tokenizer(prompt + completion)
        ids, end = list(encoded["input_ids"]), self.tokenizer.eos_token_id
        first = 0 if self.job.data.train_on == "all" else len(prompt)
        trained = self._marked(encoded, len(ids), range(first, len(prompt + completion)))
        if end is not None and ids[-1:] != [end]:
            return [*ids, end], [*trained, True]
        return ids, [*trained[:-1], end is not None or trained[-1]]

    def _conversation(self, messages: list[dict[str, Any]], prompt: int, beside: dict[str, Any]) -> Row:
        settings: dict[str, Any] = {**beside, "chat_template": self.template}
        answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        wanted = [number for number in answers if number >= prompt]
        wanted = wanted[-1:] if self.job.data.train_on == "last_assistant" else wanted
        if self.job.data.train_on != "all" and "endgeneration" in str(self.template or self.tokenizer.chat_template):
            given = self.tokenizer.apply_chat_template(
                messages, return_dict=True, return_assistant_tokens_mask=True, **settings
            )
            mask = [bool(value) for value in given["assistant_masks"]]
            return given["input_ids"], _without_runs(mask, len(answers) - len(wanted))
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, **settings)
        encoded = self.tokenizer(text, add_special_tokens=False)
        size = len(encoded["input_ids"])
        if self.job.data.train_on == "all":
            return encoded["input_ids"], [True] * size
        characters: list[int] = []
        for number in wanted:
            before = self.tokenizer.apply_chat_template(
                messages[:number], tokenize=False, add_generation_prompt=True, **settings
            )
            through = self.tokenizer.apply_chat_template(messages[: number + 1], tokenize=False, **settings)
            characters += range(len(before), len(through))
        return encoded["input_ids"], self._marked(encoded, size, characters)

    def _marked(self, encoded: Any, size: int, characters: Sequence[int]) -> list[bool]:
        """Tell of each token whether it holds one of the characters."""
        marked = {encoded.char_to_token(character) for character in characters}
        return [number in marked for number in range(size)]


def _without_runs(mask: list[bool], count: int) -> list[bool]:
    """The mask without its first runs of True."""
    kept, runs = list(mask), 0
    for place, value in enumerate(mask):
        runs += value and not (place and mask[place - 1])
        kept[place] = value and runs > count
    return kept


def _size(rows: list[Row]) -> int:
    return sum(len(ids) for ids, _ in rows)


def _messages_of(row: dict[str, Any], after: Any, other_completion: Any) -> tuple[int, list[dict[str, Any]]]:
    """(number of first messages that are a prompt, all messages)."""

    def whole(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        has_own = not row.get("system") or messages[0]["role"] == "system"
        return messages if has_own else [{"role": "system", "content": row["system"]}, *messages]

    if after is None:
        return 0, whole([_message(message) for message in row.get("messages") or row["conversations"]])
    own, other = ([_message(message) for message in completion] for completion in (after, other_completion))
    prompt = [_message(message) for message in row["prompt"]] if isinstance(row.get("prompt"), list) else []
    if prompt and (not other or "assistant" in (own[0]["role"], other[0]["role"])):
        return len(whole(prompt)), whole([*prompt, *own])
    if own[: len(prompt)] != prompt or other[: len(prompt)] != prompt:
        own, other = [*prompt, *own], [*prompt, *other]
    pairs = zip(whole(own), whole(other))
    return next(number for number, pair in enumerate(pairs) if pair[0] != pair[1]), whole(own)


def _message(value: dict[str, Any]) -> dict[str, Any]:
    message = {key: part for key, part in value.items() if part is not None and key not in ("from", "value")}
    role, content = value.get("role", value.get("from")), value.get("content", value.get("value"))
    if isinstance(content, list):
        content = "".join(part if isinstance(part, str) else part["text"] for part in content)
    return message | {"role": ROLES.get(str(role), role), "content": content or ""}


def _rows_of_files(job: Job) -> Iterator[dict[str, Any]]:
    for path in find_corpus(job.data).files:
        yield from (row for row in _rows_of_file(path) if is_kept(row, job.data.filter))


def _rows_of_file(path: Path) -> Iterator[dict[str, Any]]:
    if path.is_dir():
        dataset: Any = load_from_disk(str(path))
        yield from map(_without_nulls, dataset["train"] if isinstance(dataset, DatasetDict) else dataset)
    elif path.suffix == ".parquet":
        yield from map(_without_nulls, pq.read_table(path).to_pylist())
    elif content_suffix(path) in (".csv", ".tsv"):
        with opened_text(path, newline="") as lines:
            yield from csv.DictReader(lines, delimiter="\t" if content_suffix(path) == ".tsv" else ",")
    else:
        with opened_text(path) as lines:
            yield from (json.loads(line) for line in lines if line.strip())


def _without_nulls(value: Any) -> Any:
    """Return a value of Arrow without nulls: an object has every key that some object of its file has."""
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value
