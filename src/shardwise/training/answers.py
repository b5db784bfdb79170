"""The share of held-out answers that the model writes itself: the metric `exact_match` of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.data.packed_rows import PackedRows
from shardwise.data.packing import Windows
from shardwise.parallel.model import ParallelModel
from shardwise.training.sample import continue_greedily

EXACT_MATCH = "exact_match"


def exact_matches(
    model: ParallelModel, validation: PackedRows | None, sets: Mapping[str, Windows | PackedRows], count: int
) -> dict[str, float]:
    """Return the exact match of the validation split, if it is one, and of each set by its name. Collective."""
    splits: dict[str, Windows | PackedRows] = {} if validation is None else {EXACT_MATCH: validation}
    splits |= {f"{EXACT_MATCH}/{name}": split for name, split in sets.items()}
    return {name: exact_match(model, split, count) for name, split in splits.items() if isinstance(split, PackedRows)}


def exact_match(model: ParallelModel, rows: PackedRows, count: int) -> float:
    """Return the share of the first `count` rows whose first answer the model writes token for token. Collective."""
    pairs = rows.answers(count)
    longest = max(len(answer) for _, answer in pairs)
    written = continue_greedily(model, [prompt for prompt, _ in pairs], longest)
    return sum(own[: len(answer)] == answer for own, (_, answer) in zip(written, pairs, strict=True)) / len(pairs)
