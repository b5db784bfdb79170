"""Functions by which scripts tell Transformer Engine about context ranks."""

from __future__ import annotations

from typing import Any


def setup_transformer_engine_cp_groups(model: Any, ranks: Any, pg: Any) -> None:
    """Do nothing: `tsm.transform` has led attention over the context ranks, without Transformer Engine."""
