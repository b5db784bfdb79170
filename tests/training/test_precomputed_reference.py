"""The cache of a reference's log-probabilities: what its key depends on, and files that cannot be read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from shardwise.data.packed_rows import PackedRows, RowCorpus, RowSettings
from shardwise.errors import DataError
from shardwise.training.precomputed_reference import FILE, TENSOR, hash_of_rows, read_values, write_values


class Numbers:
    """A column in memory."""

    def __init__(self, *values: int) -> None:
        self.values = np.array(values)

    def __len__(self) -> int:
        return len(self.values)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return a stretch of the numbers."""
        return self.values[start:stop]


def splits_of(
    tokens: tuple[int, ...] = (5, 6, 7, 5, 6, 8),
    trained: tuple[int, ...] = (0, 1, 1, 0, 0, 1),
    starts: tuple[int, ...] = (0, 3),
    rows: tuple[int, ...] = (0,),
    **settings: Any,
) -> list[PackedRows]:
    columns: Any = [Numbers(*values) for values in (tokens, trained, starts, (1, 2), (1, 2))]
    keys = {"sequence_length": 8, "packing": True, "truncation": False, "padding_id": 0, "together": 2, **settings}
    return [PackedRows(RowCorpus(*columns), np.array(rows), RowSettings(**keys))]


@pytest.mark.parametrize(
    ("keys", "is_same"),
    [
        ({}, True),
        ({"packing": False}, True),
        ({"sequence_length": 16}, True),
        ({"sequence_length": 4, "truncation": True}, False),
        ({"tokens": (5, 6, 7, 5, 6, 9)}, False),
        ({"trained": (0, 1, 1, 0, 1, 1)}, False),
        ({"starts": (0, 2)}, False),
        ({"rows": ()}, False),
    ],
    ids=str,
)
def test_the_key_is_of_tokens_masks_and_what_is_kept_of_them(keys: dict[str, Any], is_same: bool) -> None:
    assert (hash_of_rows(splits_of()) == hash_of_rows(splits_of(**keys))) is is_same


def test_the_split_plays_no_part() -> None:
    first = splits_of(rows=(0, 2), starts=(0, 2, 3, 5))
    turned = [replace(first[0], rows=np.array([2])), replace(first[0], rows=np.array([0]))]
    assert hash_of_rows(first) == hash_of_rows(turned)


def wrong_length(directory: Path) -> None:
    save_file({TENSOR: torch.zeros(3, dtype=torch.float64)}, directory / FILE)


def wrong_name(directory: Path) -> None:
    save_file({"sums": torch.zeros(2, dtype=torch.float64)}, directory / FILE)


def cut(directory: Path) -> None:
    (directory / FILE).write_bytes((directory / FILE).read_bytes()[:20])


@pytest.mark.parametrize("damage", [wrong_length, wrong_name, cut])
def test_damaged_files_are_refused_by_name(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    values = torch.tensor([-1.5, -2.25], dtype=torch.float64)
    write_values(tmp_path, values)
    assert torch.equal(read_values(tmp_path, 2), values)
    damage(tmp_path)
    with pytest.raises(DataError, match=f"cached log-probabilities {tmp_path} .*; delete it"):
        read_values(tmp_path, 2)
