"""The share of held-out answers that the model writes itself: the metric `exact_match` of an evaluation.

A model that takes its likeliest token writes an answer if and only if each token of it is the likeliest behind those
before. So one forward over a row with its answer tells what writing it would, and ranks of different data share the
rows.
"""

from __future__ import annotations

from shardwise.data.packed_rows import PackedRows
from shardwise.data.token_data import TokenData
from shardwise.parallel.model import ParallelModel
from shardwise.training.scores import Continuation, log_likelihoods

EXACT_MATCH = "exact_match"


def exact_matches(model: ParallelModel, data: TokenData, count: int) -> dict[str, float]:
    """Return the shares of the first `count` rows whose first answer the model writes token for token. Collective.

    `exact_match` is of the validation split, with several sources of the rows of all of them; `exact_match/NAME` is of
    a set or of a source.
    """
    by_name = {
        name: _written(model, split, count) for name, split in data.sets.items() if isinstance(split, PackedRows)
    }
    if isinstance(data.validation, PackedRows):
        whole = _written(model, data.validation, count)
    else:
        sources = {source.name for source in data.sources}
        whole = [is_written for name, rows in by_name.items() if name in sources for is_written in rows]
    shares = {EXACT_MATCH: whole} | {f"{EXACT_MATCH}/{name}": rows for name, rows in by_name.items()}
    return {name: sum(rows) / len(rows) for name, rows in shares.items()}


def _written(model: ParallelModel, rows: PackedRows, count: int) -> list[bool]:
    """Return of each of the first `count` rows if the model writes its first answer. Collective."""
    scores = log_likelihoods(model, [Continuation(*pair) for pair in rows.answers(count)])
    return [is_likeliest for _, is_likeliest in scores]
