"""Rows of speech with its text: the columns `audio`, a file, and the text of `data.field`.

A file is read when its row is, and becomes `input_features` by the model's feature extractor. Labels are the text's
tokens with the tokenizer's special ones, without that with which the decoder starts, and -100 up to
`data.sequence_length`.
"""

from __future__ import annotations

import wave
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwise.data.file_rows import FileDataset, FileRow, read_rows
from shardwise.data.processors import SOUND, open_processor
from shardwise.data.readers import check_text
from shardwise.data.tokenizer import check_vocabulary, given_tokenizer, load_tokenizer
from shardwise.errors import ConfigError, DataError
from shardwise.job.schema import Job
from shardwise.job.tasks import IGNORED
from shardwise.model.build import load_config

WAVE_DTYPES = {1: "u1", 2: "<i2", 4: "<i4"}  # by the bytes of a sample
# Bytes of sound from which on a header means that its writer, at the end of a pipe, did not know how many come.
UNKNOWN_SIZE = 0x7FFF0000


@dataclass(frozen=True)
class TranscribedSpeech:
    """Rows of speech: a map-style data set of the extractor's tensors and `labels`.

    Attributes:
        rows: with `audio` and `text`.
        text: the column with the text.
        extractor: makes tensors of sound.
        tokenizer: of the text.
        start: the token with which the decoder starts.
        length: of the labels.
    """

    rows: Sequence[FileRow]
    text: str
    extractor: Any
    tokenizer: Any
    start: int | None
    length: int

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.rows[index]
        path = row.file(row.columns["audio"], "audio")
        samples = self._checked(row, path, *read_sound(path, row.where))
        features = self.extractor(samples, sampling_rate=self.extractor.sampling_rate, return_tensors="pt")
        return {**{name: values[0] for name, values in features.items()}, "labels": self._labels(row)}

    def _checked(self, row: FileRow, path: Path, samples: np.ndarray, rate: int) -> np.ndarray:
        """Return the samples, of which there are some and not too many, in the extractor's rate.

        Raises:
            DataError: they are not.
        """
        wanted, most = self.extractor.sampling_rate, getattr(self.extractor, "n_samples", None)
        if not len(samples):
            raise DataError(f"{row.where}: {path} holds no sound; remove the row, or record it again")
        if rate != wanted:
            raise DataError(
                f"{row.where}: {path} has {rate} samples a second and the feature extractor takes {wanted}; convert "
                f"it, as by `ffmpeg -i {path.name} -ar {wanted} out.wav`"
            )
        if most is not None and len(samples) > most:
            raise DataError(
                f"{row.where}: {path} is {len(samples) / rate:.1f} seconds long and the feature extractor takes "
                f"{most / rate:.1f}; cut it, with its text"
            )
        return samples

    def _labels(self, row: FileRow) -> Tensor:
        ids: list[int] = self.tokenizer(row.columns[self.text]).input_ids
        ids = ids[1:] if ids and ids[0] == self.start else ids
        if len(ids) > self.length:
            raise DataError(
                f"{row.where}: the text has {len(ids)} tokens and data.sequence_length={self.length}; use a longer "
                "one, or cut the row"
            )
        return torch.tensor(ids + [IGNORED] * (self.length - len(ids)))


def open_speech(job: Job, model_vocabulary: int | None) -> tuple[list[FileRow], FileDataset]:
    """Return the rows of a job of speech, and what makes its data set of some of them.

    Raises:
        ConfigError: there is no tokenizer.
        DataError: a text is empty, or a file is missing.
    """
    source = given_tokenizer(job)
    if source is None:
        raise ConfigError(
            f"model.task={job.model.task!r} has no tokenizer for its texts; set data.tokenizer, or model.path to a "
            "directory that holds one"
        )
    tokenizer, extractor = load_tokenizer(source), open_processor(job, SOUND)
    check_vocabulary(max(tokenizer.get_vocab().values()) + 1, model_vocabulary, source.directory)
    text, start = job.data.field, getattr(load_config(job), "decoder_start_token_id", None)
    rows = read_rows(job, ("audio", text))
    for row in rows:
        check_text(row.where, row.columns[text])
        if not row.columns[text].strip():
            raise DataError(f"{row.where}: an empty {text}, which teaches nothing; remove the row")
        row.file(row.columns["audio"], "audio")
    length = job.data.sequence_length
    make = lambda some: TranscribedSpeech(some, text, extractor, tokenizer, start, length)  # noqa: E731
    return rows, FileDataset(make, str(source.directory))


def read_sound(path: Path, where: str) -> tuple[np.ndarray, int]:
    """Return samples [n] float32 from -1 to 1, the mean of all channels, and how many are a second.

    Raises:
        DataError: the file cannot be read, or is cut: its text says more than is heard.
    """
    try:
        with wave.open(str(path)) as file:
            width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
            frames, frame_size = file.getnframes(), width * channels
            content = file.readframes(frames)
    except (wave.Error, EOFError):  # floats, or no wave
        return _read_by_soundfile(path, where)
    whole = len(content) // frame_size
    if whole < frames and frames * frame_size < UNKNOWN_SIZE:
        raise DataError(
            f"{where}: {path} ends after {whole:,} of the {frames:,} samples of its header; copy it again, or remove "
            "the row"
        )
    if width not in WAVE_DTYPES:
        return _read_by_soundfile(path, where)
    values: np.ndarray = np.frombuffer(content[: whole * frame_size], WAVE_DTYPES[width]).astype(np.float32)
    values = (values - 128) / 128 if width == 1 else values / 2.0 ** (8 * width - 1)
    return values.reshape(-1, channels).mean(1, dtype=np.float32), rate


def _read_by_soundfile(path: Path, where: str) -> tuple[np.ndarray, int]:
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: libsndfile is missing
        raise DataError(
            f"{where}: {path} is no wave file of whole numbers, and others are read by soundfile, which is not "
            "installed; run `pip install 'shardwise[audio]'`, or convert it"
        ) from error
    try:
        values, rate = soundfile.read(path, dtype="float32", always_2d=True)
    except (OSError, RuntimeError) as error:
        raise DataError(f"{where}: {path} cannot be read as sound: {error}; mend it, or remove the row") from error
    return values.mean(1, dtype=np.float32), int(rate)
