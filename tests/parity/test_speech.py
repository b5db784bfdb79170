"""Speech and its text on every layout against one process, and rows of speech that are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardwise.data.prepare import prepare
from shardwise.data.speech import read_sound
from shardwise.errors import ConfigError, DataError, LegalityError
from shardwise.job.schema import Job
from shardwise.plan.plan import World, resolve
from shardwise.testing.toy_configs import toy_config
from shardwise.testing.world import WorldPool
from shardwise.training.setup import study
from tests.parity.jobs import check_agrees
from tests.parity.speech_files import END, EXTRACTOR, RATE, START, write_rows, write_tokenizer, write_wave

LENGTH = 6
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "shard 2, replica 2": (4, {"sharded_data_parallel_degree": 2}),
    "tensor 2": (2, {"tensor_parallel_degree": 2}),
    "pipeline 2": (2, {"pipeline_parallel_degree": 2}),
}


def speech_job(tmp_path: Path, **sections: Any) -> Job:
    """Return a job of speech on the rows in a directory."""
    config = toy_config(
        "whisper", num_mel_bins=8, max_source_positions=16, max_target_positions=16, decoder_start_token_id=START,
        pad_token_id=0,
    )  # fmt: skip
    base: dict[str, Any] = {
        "model": {"config": config, "task": "speech_seq2seq", "attention": "eager"},
        "data": {
            "path": str(tmp_path / "rows.jsonl"), "processor": EXTRACTOR, "sequence_length": LENGTH,
            "tokenizer": str(write_tokenizer(tmp_path / "tokenizer")),
        },
        "training": {"steps": 2, "sequences_per_step": 4, "microbatch_size": 1},
        "precision": {"compute": "fp64"}, "parallel": {"device": "cpu"},
    }  # fmt: skip
    return Job.model_validate({**base, **{name: base.get(name, {}) | keys for name, keys in sections.items()}})


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_verify_agrees(world_pool: WorldPool, tmp_path: Path, layout: str) -> None:
    ranks, parallel = LAYOUTS[layout]
    write_rows(tmp_path)
    check_agrees(world_pool, ranks, speech_job(tmp_path, parallel=parallel))


def test_context_ranks_are_refused(tmp_path: Path) -> None:
    write_rows(tmp_path)
    job = speech_job(tmp_path, parallel={"context_parallel_degree": 2})
    with pytest.raises(LegalityError, match="context_parallel_degree=2"):
        resolve(job, World(2, "cpu", 2), study(job))


def rows_file(tmp_path: Path, *rows: dict[str, Any]) -> Path:
    """Write rows; two right ones come first."""
    write_wave(tmp_path / "tone.wav", np.sin(np.arange(RATE // 2)))
    right = [{"audio": "tone.wav", "text": "low high"}, {"audio": "tone.wav", "text": "soft"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in [*right, *rows]))
    return tmp_path


def test_labels_are_the_text_without_the_start(tmp_path: Path) -> None:
    data = prepare(speech_job(rows_file(tmp_path)))
    labels = {tuple(split.sample(0)["labels"].tolist()) for split in (data.train, data.validation)}
    assert labels == {(3, 4, END, -100, -100, -100), (5, END, -100, -100, -100, -100)}
    assert data.train.sample(0)["input_features"].shape == (8, 32)


@pytest.mark.parametrize(
    "row, says",
    [
        ({"audio": "none.wav", "text": "low"}, r"rows.jsonl, line 3: audio='none.wav' is no file"),
        ({"audio": "tone.wav", "text": " "}, r"line 3: an empty text"),
        ({"audio": "tone.wav"}, r"line 3: no column 'text'"),
        ({"audio": "tone.wav", "text": "low " * 9}, r"line 3: the text has 10 tokens and data.sequence_length=6"),
        ({"audio": "empty.wav", "text": "low"}, r"line 3: .*empty.wav holds no sound"),
        ({"audio": "other.wav", "text": "low"}, r"line 3: .*other.wav has 1600 samples a second .* takes 800"),
        ({"audio": "long.wav", "text": "low"}, r"line 3: .*long.wav is 2.0 seconds long .* takes 1.0"),
        ({"audio": "text.wav", "text": "low"}, r"line 3: .*text.wav (is no wave file|cannot be read)"),
    ],
)
def test_rows_that_are_refused(tmp_path: Path, row: dict[str, Any], says: str) -> None:
    write_wave(tmp_path / "empty.wav", np.zeros(0))
    write_wave(tmp_path / "other.wav", np.zeros(400), 2 * RATE)
    write_wave(tmp_path / "long.wav", np.zeros(2 * RATE))
    (tmp_path / "text.wav").write_text("no sound")
    job = speech_job(rows_file(tmp_path, row))
    with pytest.raises(DataError, match=says):
        data = prepare(job)
        for split in (data.train, data.validation):
            for number in range(len(split)):
                split.sample(number)


def test_a_text_needs_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"set data\.tokenizer, or model\.path"):
        prepare(speech_job(rows_file(tmp_path), data={"tokenizer": None}))


@pytest.mark.parametrize("missing, left", [(2, 99), (3, 99), (200, 50), (400, 0)])
def test_a_wave_that_is_cut_is_refused(tmp_path: Path, missing: int, left: int) -> None:
    """Its text says more than is heard of it, whether a frame of two channels is cut or many are gone."""
    content = stereo_wave(tmp_path / "a.wav", 100)
    (tmp_path / "a.wav").write_bytes(content[:-missing])
    with pytest.raises(DataError, match=rf"row: .*a\.wav ends after {left} of the 100 samples .*; copy it again"):
        read_sound(tmp_path / "a.wav", "row")


@pytest.mark.parametrize("size", [0xFFFFFFFF, 0x7FFFF000])
def test_a_wave_whose_writer_knew_no_length_is_read_to_its_end(tmp_path: Path, size: int) -> None:
    content = stereo_wave(tmp_path / "a.wav", 100)
    sizes = (min(size + 36, 0xFFFFFFFF).to_bytes(4, "little"), size.to_bytes(4, "little"))
    (tmp_path / "a.wav").write_bytes(content[:4] + sizes[0] + content[8:40] + sizes[1] + content[44:-1])
    samples, _ = read_sound(tmp_path / "a.wav", "row")
    assert (samples * 2**15).tolist() == list(range(99))


def stereo_wave(path: Path, frames: int) -> bytes:
    """Write and return frames of 0, 1, 2 … on two channels."""
    import wave

    with wave.open(str(path), "wb") as file:
        file.setparams((2, 2, RATE, frames, "NONE", ""))
        file.writeframes(np.repeat(np.arange(frames, dtype="<i2"), 2).tobytes())
    return path.read_bytes()


@pytest.mark.parametrize("width, lowest, highest", [(1, 0, 255), (2, -32768, 32767), (4, -(2**31), 2**31 - 1)])
def test_samples_are_read_from_minus_one_to_one(tmp_path: Path, width: int, lowest: int, highest: int) -> None:
    import wave

    values = np.array([[lowest, lowest], [highest, highest]], {1: "u1", 2: "<i2", 4: "<i4"}[width])
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setparams((2, width, RATE, 2, "NONE", ""))
        file.writeframes(values.tobytes())
    samples, rate = read_sound(tmp_path / "a.wav", "row")
    assert rate == RATE
    assert torch.allclose(torch.from_numpy(samples), torch.tensor([-1.0, 1.0]), atol=0.01)
