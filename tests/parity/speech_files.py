"""Files of speech for tests: waves of tones with words, a feature extractor's config and a tokenizer."""

from __future__ import annotations

import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

RATE, SECONDS = 800, 1
WORDS = ("low", "high", "soft", "loud")
EXTRACTOR: dict[str, Any] = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 8, "sampling_rate": RATE, "hop_length": 25, "n_fft": 50, "chunk_length": SECONDS,
}  # fmt: skip
START, END, PADDING = 1, 2, 0


def write_tokenizer(directory: Path) -> Path:
    """Save a tokenizer of whole words that puts a start and an end around a text; return its directory."""
    vocabulary = {word: number for number, word in enumerate(("<pad>", "<start>", "<end>", *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    around, names = [("<start>", START), ("<end>", END)], {"pad_token": "<pad>", "eos_token": "<end>"}
    tokenizer.post_processor = processors.TemplateProcessing(single="<start> $A <end>", special_tokens=around)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<start>", **names)
    fast.save_pretrained(directory)
    return directory


def write_wave(path: Path, samples: np.ndarray, rate: int = RATE) -> None:
    """Write samples from -1 to 1 as 16 bits."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((samples * 32767).astype("<i2").tobytes())


def write_rows(directory: Path, rows: int = 20) -> Path:
    """Write tones with one to three words each; return the file of rows."""
    draw, lines = np.random.default_rng(5), []
    for number in range(rows):
        length = draw.integers(RATE // 4, RATE * SECONDS)
        tone = np.sin(np.arange(length) * draw.uniform(0.1, 2)) * draw.uniform(0.1, 0.9)
        write_wave(directory / f"{number}.wav", tone)
        text = " ".join(draw.choice(WORDS, draw.integers(1, 4)))
        lines.append(json.dumps({"audio": f"{number}.wav", "text": text}))
    (directory / "rows.jsonl").write_text("\n".join(lines))
    return directory / "rows.jsonl"
