"""The table of what collectives do: each case of ours is what the page says; none is wrong but what torch copies."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from shardwise.testing.world import WorldPool
from tools.collectives_table import BACKENDS, RANKS, cases, cells, outcomes, page

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "collectives.md"


def rows_of_page() -> dict[tuple[str, ...], str]:
    """Our cell of each row of the page."""
    found = re.findall(r"^\| (`[^|]*) \| ([^|]*) \| ([^|]*) \| ([^|]*) \|", PAGE.read_text(encoding="utf-8"), re.M)
    return {tuple(word.strip() for word in row[:3]): row[3].strip() for row in found}


def test_the_page_has_every_row() -> None:
    assert list(rows_of_page()) == list(dict.fromkeys(case[:3] for case in cases()))
    wrong = [key for key, cell in rows_of_page().items() if "wrong" in cell]
    assert {operation for operation, *_ in wrong} == {"`all_reduce` of sparse tensors"}


def test_a_cell_names_dtypes_that_are_not_right() -> None:
    found = ["refused" if str(case[3]) == "torch.uint16" else "right" for case in cases()]
    assert Counter(cells(found).values()) == {"right; refused: uint16": len(rows_of_page())}
    assert page(dict.fromkeys(BACKENDS, found)).count("| right; refused: uint16 | right; refused: uint16 |") == len(
        rows_of_page()
    )


@pytest.mark.slow
def test_what_the_page_says_of_ours_is_what_a_run_gives(world_pool: WorldPool) -> None:
    assert cells(world_pool.run(RANKS, outcomes, BACKENDS[0], timeout=280)[0]) == rows_of_page()
