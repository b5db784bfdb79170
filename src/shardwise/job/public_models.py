"""Dimensions of public models by their names on the hub, so that a job is planned without asking one.

`data/public_models.json` has fields of each model's published config.json: its type, sizes, vocabulary, positions and
experts. What sizes do not show (epsilons, rotary frequencies) stands in the model's own directory.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

DATA = Path(__file__).parent / "data" / "public_models.json"
WITHOUT_SIZE = re.compile(
    r"-(instruct|chat|hf|scout|maverick|v0\.\d)\b|\bmeta-"
)  # words of names that say nothing of a model's size


class PublicModel(NamedTuple):
    """A model by its first name on the hub, with fields of its Hugging Face config."""

    name: str
    config: dict[str, Any]


@cache
def public_models() -> dict[str, PublicModel]:
    """Return every model by each of its names."""
    rows = json.loads(DATA.read_text(encoding="utf-8"))
    return {name: PublicModel(row["names"][0], row["config"]) for row in rows for name in row["names"]}


def find_model(name: str) -> PublicModel | None:
    """Return the model of a name on the hub, in any case, or of a directory that ends with one; None if unknown."""
    by_name = {known.lower(): model for known, model in public_models().items()}
    wanted = name.rstrip("/").lower()
    whole = by_name.get(wanted)
    last = {known.rpartition("/")[2]: model for known, model in by_name.items()}
    return whole or last.get(wanted.rpartition("/")[2])


def find_mentioned(text: str) -> PublicModel | None:
    """Return the model that a run's or file's name mentions: `hf_llama3_2_1b_seq8k`, `qwen-2d5-7b`; the longest."""
    text = _letters(text)
    mentioned = [letters for letters in _spellings() if letters in text]
    return _spellings()[max(mentioned, key=len)] if mentioned else None


@cache
def _spellings() -> dict[str, PublicModel]:
    return {
        _letters(WITHOUT_SIZE.sub("", name.rpartition("/")[2].lower())): model
        for name, model in public_models().items()
    }


def _letters(name: str) -> str:
    """Return the letters and digits of a name, points spelled out: `qwen3-1-dot-7b` and `Qwen3-1.7B` are one."""
    name = re.sub(r"(?<=\d)d(?=\d)", ".", name.lower())
    name = name.replace("dot", "").replace("distilled", "distill")
    return re.sub(r"[^a-z0-9]", "", name)
