"""The oracle's own reader: samples of a step straight from the token cache (or the user's data set).

Written from the definitions in `data/packing.py`, `data/loader.py` and `data/order.py`, not with their code: it opens
the Arrow files with pyarrow, orders samples, cuts windows, restarts positions, masks and clears labels by itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import torch
import torch.nn.functional as F
import xxhash
from torch import Tensor

from shardwise.job.objects import load_object
from shardwise.job.schema import Job

NOT_COUNTED = -100
KEPT = 1024  # samples that are kept, since a step is read several times
EVALUATION = 1 << 62  # counters of validation samples begin here


@dataclass
class Rows:
    """Samples of one step: model inputs, aligned labels, global sample counters, document numbers.

    `completions`, of preferences, numbers those of a row: 2k is the chosen one of pair k, 2k + 1 the rejected one.
    `filled` [B, S] is True where a row is filled up; None: nowhere.
    """

    inputs: dict[str, Tensor]
    labels: Tensor | None
    counters: list[int]
    documents: Tensor | None = None
    completions: Tensor | None = None
    filled: Tensor | None = None

    def count(self) -> int:
        """Labels that count, or rows where there are no labels or they are floats."""
        if self.labels is None or self.labels.is_floating_point():
            return len(self.counters)
        if not self.labels.dtype.is_signed:  # flags and bytes, which cannot be NOT_COUNTED
            return self.labels.numel()
        return int((self.labels != NOT_COUNTED).sum())

    def tokens(self) -> Tensor | None:
        """Return [B * S] bool, False where a row is filled up: by its reader, or as a mask of the batch says."""
        mask = self.inputs.get("attention_mask")
        if self.filled is not None:
            return ~self.filled.flatten()
        return mask.bool().flatten() if mask is not None and mask.dim() == 2 else None

    def samples(self) -> list[Tensor]:
        """Return for each pair, document, or row without them, the [B, S] positions of its labels that count."""
        assert self.labels is not None
        counted = self.labels != NOT_COUNTED
        row = torch.arange(len(counted)).unsqueeze(1)
        documents = torch.zeros_like(self.labels) if self.documents is None else self.documents
        documents = documents if self.completions is None else self.completions // 2
        places = [(row == r) & (documents == d) & counted for r in row[:, 0] for d in documents[r].unique()]
        return [place for place in places if place.any()]


def shortened(rows: Rows, number: int) -> Rows:
    """Cut each sample into `number` sequences, numbered as a run of that length would: one after the other."""
    if number == 1:
        return rows
    assert rows.labels is not None
    length, places = rows.labels.shape[1] // number, range(number)

    def sliced(values: Tensor) -> Tensor:
        return torch.stack([sample[place * length : (place + 1) * length] for sample in values for place in places])

    inputs, documents = {name: sliced(values) for name, values in rows.inputs.items()}, None
    if rows.documents is not None:
        documents = torch.stack([sequence.unique(return_inverse=True)[1] for sequence in sliced(rows.documents)])
        ranks = [[int((d[:t] == d[t]).sum()) for t in range(length)] for d in documents]  # tokens of it before
        inputs["position_ids"] = torch.tensor(ranks)
    counters = [counter * number + place for counter in rows.counters for place in places]
    return Rows(inputs, sliced(rows.labels), counters, documents)


class Source(Protocol):
    """Training samples by global counter, and validation samples by their place behind EVALUATION.

    `validation_size` counts the latter; 0 where they are not read.
    """

    validation_size: int

    def rows(self, counters: Sequence[int]) -> Rows: ...


class Places:
    """The sequence of each sample of one corpus, among those that train and among those held out."""

    def __init__(self, seed: int, size: int) -> None:
        self.seed, self.size = seed, size

    def training(self, counter: int) -> int:
        return shuffled_index(self.seed, counter, self.size)

    def held_out(self, number: int) -> int:
        return number


@dataclass(frozen=True)
class DocumentStream:
    """Documents one after the other: their tokens, and where each begins."""

    tokens: np.ndarray
    starts: np.ndarray

    @classmethod
    def of(cls, documents: Sequence[np.ndarray]) -> DocumentStream:
        """Join documents; empty ones are none."""
        kept = [document for document in documents if len(document)]
        return cls(np.concatenate(kept), np.cumsum([0, *map(len, kept)])[:-1])


class TokenSource:
    """Windows of a cached token stream."""

    def __init__(self, job: Job, directory: Path) -> None:
        self.job, self.seed, self.length = job, job.training.seed, job.data.sequence_length
        tokens, starts = (_column(directory / name).to_numpy() for name in ("tokens.arrow", "documents.arrow"))
        self.tokenizer = json.loads((directory / "shardwise.json").read_text())["tokenizer"]
        self.causal = job.model.task == "causal_lm"
        extra = 1 if self.causal else 0
        windows = (len(tokens) - 2 * extra) // self.length
        self.validation_size = max(1, int(windows * job.data.validation_fraction))
        self.size, held_out = windows - self.validation_size, self.validation_size * self.length + extra
        documents = np.split(tokens, starts[1:])
        self.is_by_place = job.data.validation_split == "place"
        if self.is_by_place:
            first = self.size * self.length + extra
            inside = starts[(starts > first) & (starts < first + held_out)] - first
            left, validation = documents, np.split(tokens[first : first + held_out], inside)
        else:
            left, validation = _held_out(documents, held_out, self.seed)
        self.training, self.validation = DocumentStream.of(left), DocumentStream.of(validation)
        self.places = Places(self.seed, self.size)
        self._read: dict[int, dict[str, np.ndarray]] = {}  # the last samples

    def rows(self, counters: Sequence[int]) -> Rows:
        if len(self._read) > KEPT:
            self._read.clear()
        for counter in counters:
            self._read[counter] = self._read.get(counter) or self._sample(counter)
        samples = [self._read[counter] for counter in counters]
        stacked = {key: torch.from_numpy(np.stack([sample[key] for sample in samples])) for key in samples[0]}
        labels, documents = stacked.pop("labels"), stacked.pop("documents", None)
        return Rows(stacked, labels, list(counters), documents)

    def _sample(self, counter: int) -> dict[str, np.ndarray]:
        stream, place = self._place(counter)
        start = place * self.length
        window = stream.tokens[start : start + self.length + self.causal].astype(np.int64)
        if self.causal:
            sample = {"input_ids": window[:-1], "labels": window[1:].copy()}
        elif self.job.model.task == "seq2seq_lm":
            sample = self._with_spans(window.tolist(), counter)
        else:
            sample = self._masked(window, counter)
        if self.job.data.isolate_documents:
            self._isolate(sample, stream, start)
        return sample

    def _place(self, counter: int) -> tuple[DocumentStream, int]:
        """Return the stream of a sample, and the number of its window there."""
        if counter < EVALUATION:
            return self.training, self.places.training(counter)
        place = self.places.held_out(counter - EVALUATION)
        return self.validation, place if self.is_by_place else shuffled_index(self.seed, place, self.validation_size)

    def _isolate(self, sample: dict[str, np.ndarray], stream: DocumentStream, start: int) -> None:
        """Number of the document of each position; positions from 0 in each; no label from another document."""
        place = np.arange(start, start + self.length + 1)
        document = np.searchsorted(stream.starts, place, side="right")
        begins = np.maximum(stream.starts[document[:-1] - 1], start)  # of the position's document, within this window
        sample["position_ids"] = place[:-1] - begins
        sample["documents"] = document[:-1] - document[0]
        if self.causal:
            sample["labels"][document[1:] != document[:-1]] = NOT_COUNTED

    def _with_spans(self, window: list[int], counter: int) -> dict[str, np.ndarray]:
        """T5's spans, by cutting at the places of the smallest draws, token by token."""
        data = self.job.data
        gone = min(max(round(len(window) * data.mask_probability), 1), len(window) - 1)
        spans = min(max(round(gone / data.mean_span_length), 1), len(window) - gone)
        philox = np.random.Philox(key=np.array([self.seed, counter], dtype=np.uint64))
        draws = philox.random_raw(len(window) - 2).tolist() if len(window) > 2 else []
        ends = []
        for count, own in ((gone, draws[: gone - 1]), (len(window) - gone, draws[gone - 1 :])):
            places = sorted(range(count - 1), key=lambda place, own=own: (own[place], place))[: spans - 1]  # type: ignore
            ends.append([*sorted(place + 1 for place in places), count])
        inputs: list[int] = []
        labels: list[int] = []
        at = last_gone = last_kept = 0
        for sentinel, end_gone, end_kept in zip(self.tokenizer["sentinel_ids"], *ends):
            kept, left_out = end_kept - last_kept, end_gone - last_gone
            inputs += [*window[at : at + kept], sentinel]
            labels += [sentinel, *window[at + kept : at + kept + left_out]]
            at, last_gone, last_kept = at + kept + left_out, end_gone, end_kept
        if self.tokenizer["eos_id"] is not None:
            inputs, labels = [*inputs, self.tokenizer["eos_id"]], [*labels, self.tokenizer["eos_id"]]
        return {"input_ids": np.array(inputs), "labels": np.array(labels)}

    def _masked(self, window: np.ndarray, counter: int) -> dict[str, np.ndarray]:
        """BERT's 80/10/10 masking with three rows of Philox draws keyed by (seed, counter), token by token."""
        philox = np.random.Philox(key=np.array([self.seed, counter], dtype=np.uint64))
        choose, kind, replacement = philox.random_raw(3 * self.length).reshape(3, self.length).tolist()
        limit = int(self.job.data.mask_probability * 2**64)
        inputs, labels = window.copy(), np.full(self.length, NOT_COUNTED, dtype=np.int64)
        for t, token in enumerate(window.tolist()):
            if token in self.tokenizer["special_ids"] or choose[t] >= limit:
                continue
            labels[t] = token
            if kind[t] % 10 < 8:
                inputs[t] = self.tokenizer["mask_id"]
            elif kind[t] % 10 == 8:
                inputs[t] = replacement[t] % self.tokenizer["vocabulary_size"]
        return {"input_ids": inputs, "labels": labels}


class FactorySource:
    """Samples of `data.factory`: all but the last `validation_fraction`. Tensors that are not `stacked` are joined."""

    def __init__(self, job: Job, labels_next_tokens: bool = False) -> None:
        self.samples: Any = load_object(str(job.data.factory))(**job.data.factory_arguments)
        self.stacked = getattr(self.samples, "stacked", None)
        size = min(len(self.samples), job.data.max_documents or len(self.samples))
        self.validation_size = max(1, int(size * job.data.validation_fraction))
        self.seed, self.size = job.training.seed, size - self.validation_size
        self.shifts_labels = labels_next_tokens and job.model.loss is None

    def form(self, counter: int) -> tuple[Any, ...]:
        """Return what samples of one forward have in common: the shapes of what is stacked."""
        sample = self.samples[self._place(counter)]
        return tuple((key, value.shape if self._is_stacked(key) else value.shape[1:]) for key, value in sample.items())

    def _is_stacked(self, key: str) -> bool:
        return self.stacked is None or key in self.stacked

    def rows(self, counters: Sequence[int]) -> Rows:
        chosen = [self.samples[self._place(counter)] for counter in counters]
        tensors = {}
        for key in chosen[0]:
            join = torch.stack if self._is_stacked(key) else torch.cat
            tensors[key] = join([sample[key] for sample in chosen])
        labels = tensors.pop("labels", None)
        if labels is not None and self.shifts_labels:  # transformers' labels stand at their own token
            labels = F.pad(labels[:, 1:], (0, 1), value=NOT_COUNTED)
        return Rows(tensors, labels, list(counters))

    def _place(self, counter: int) -> int:
        if counter < EVALUATION:
            return shuffled_index(self.seed, counter, self.size)
        return self.size + counter - EVALUATION


def _held_out(documents: Sequence[np.ndarray], tokens: int, seed: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Cut documents in what trains and what is held out: so many tokens, of those with the smallest draws.

    Of the last of them the end is held out.
    """
    left, validation = list(documents), [document[:0] for document in documents]
    draws = [mixed(mixed(seed) ^ xxhash.xxh3_64_intdigest(document.tobytes())) for document in documents]
    for number in sorted(range(len(left)), key=lambda number: (draws[number], number)):
        kept = max(len(left[number]) - tokens, 0)
        tokens -= len(left[number]) - kept
        left[number], validation[number] = left[number][:kept], left[number][kept:]
    return left, validation


def shuffled_index(seed: int, counter: int, size: int) -> int:
    """Return the index of a sample: six Feistel rounds on two halves of its place in the epoch, until it is below size.

    By the definition in `data/order.py`.
    """
    epoch, place = divmod(counter, size)
    half = 1
    while half**2 < size:
        half *= 2
    while True:
        left, right = divmod(place, half)
        for number in range(6):
            draw = hashlib.blake2b(
                bytes([number]) + right.to_bytes(8, "little"), key=f"{seed}:{epoch}".encode(), digest_size=8
            )
            left, right = right, left ^ (int.from_bytes(draw.digest(), "little") % half)
        place = left * half + right
        if place < size:
            return place


def mixed(value: int) -> int:
    """Return SplitMix64's output for its state."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
    return value ^ (value >> 31)


def _column(path: Path) -> pa.ChunkedArray:
    with pa.memory_map(str(path)) as file:
        return pa.ipc.open_stream(file).read_all().column(0)
