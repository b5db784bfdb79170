"""Rows exchanged from where they lie to where they go: the engine does what Gloo does with copies before and after."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwise._torch_compat.groups import row_engine
from shardwise.collectives.experts import RowExchange
from shardwise.collectives.names import CollectiveName
from shardwise.testing.world import WorldPool

SENT = [[3, 0, 2], [1, 4, 0], [0, 2, 5]]  # rows of each rank to each rank
WIDE = 40_000  # numbers of a row: more than a rank stages at once


def exchanged(backend: str, width: int) -> list[Tensor]:
    """Return what comes of rows of this rank, in order and by places, and whether the engine moved them."""
    rank, group = dist.get_rank(), dist.new_group(backend=backend)
    name = CollectiveName("experts", "world", "all_to_all_single")
    exchange = RowExchange(group, name, SENT[rank], [sent[rank] for sent in SENT])
    rows = torch.arange(6.0 * width).view(6, width) + 1000 * rank
    taken = torch.arange(sum(exchange.sent)) * 5 % 6  # some of them twice
    places = torch.randperm(9, generator=torch.Generator().manual_seed(rank))[: sum(exchange.received)]
    out = torch.full((9, width), -1.0)
    assert exchange.exchange(rows, taken, places, out) is out
    whole = rows.index_select(0, taken)
    plain = exchange.exchange(whole)
    assert torch.equal(plain, exchange.start(rows, taken).wait()) and torch.equal(plain, out[places])
    assert torch.equal(exchange.reversed.exchange(out, places), whole)
    return [torch.tensor(row_engine(group, rows) is not None), out]


@pytest.mark.parametrize("width", [3, WIDE])
def test_rows_come_as_over_gloo(world_pool: WorldPool, width: int) -> None:
    ours, theirs = (world_pool.run(3, exchanged, backend, width) for backend in ("shardwise", "gloo"))
    for (by_engine, rows), (by_gloo, expected) in zip(ours, theirs, strict=True):
        assert by_engine and not by_gloo
        assert torch.equal(rows, expected) and (rows == -1).all(1).any()


def misplaced(place: int) -> str:
    group = dist.new_group(backend="shardwise")
    name = CollectiveName("experts", "world", "all_to_all_single")
    exchange = RowExchange(group, name, [1, 1], [1, 1])
    with pytest.raises(RuntimeError, match="a place is none of 2 rows") as raised:
        exchange.exchange(torch.zeros(2, 3), torch.tensor([0, place]))
    return str(raised.value)


@pytest.mark.parametrize("place", [2, -1])
def test_a_place_outside_of_the_rows_is_refused(world_pool: WorldPool, place: int) -> None:
    assert len(world_pool.run(2, misplaced, place)) == 2
