"""The share of held-out answers that the model writes itself: the metric `exact_match` of an evaluation.

A model that takes its likeliest token writes an answer if and only if each token of it is the likeliest behind those
before. So one forward over a row with its answer tells what writing it would, and ranks of different data share the
rows.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.data.packed_rows import PackedRows
from shardwise.data.packing import Windows
from shardwise.parallel.model import ParallelModel
from shardwise.training.scores import Continuation, log_likelihoods

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
    scores = log_likelihoods(model, [Continuation(*pair) for pair in rows.answers(count)])
    return sum(is_likeliest for _, is_likeliest in scores) / len(scores)
