"""A ring's attention and its gradients equal those of whole sequences, however blocks are cut."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.collectives.context import deal_chunks, gather_sequence, heads_for_rows, join_chunks, rows_for_heads
from shardwise.kernels.attention import ring
from shardwise.kernels.attention.masks import document_mask
from shardwise.kernels.attention.ring import RingSettings, ring_attention
from shardwise.testing.world import WorldPool

LENGTH, HEADS, GROUPS = 24, 4, 2


def drawn(width: int) -> list[Tensor]:
    """Whole query, key, value and output gradient [2, h, S, d], equal on every rank."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(HEADS, 6), (GROUPS, 6), (GROUPS, width), (HEADS, width)]
    return [torch.randn(2, heads, LENGTH, d, generator=generator, dtype=torch.float64) for heads, d in shapes]


def expected(whole: list[Tensor], mask: Tensor) -> list[Tensor]:
    """Output and gradients of plain attention over whole sequences."""
    query, key, value = (tensor.clone().requires_grad_() for tensor in whole[:3])
    wide = [tensor.repeat_interleave(HEADS // GROUPS, 1) for tensor in (key, value)]
    output = (query @ wide[0].mT * 0.3 + mask).softmax(-1) @ wide[1]
    output.backward(whole[3])
    return [output.detach(), *(tensor.grad for tensor in (query, key, value) if tensor.grad is not None)]


def worst(kind: str, width: int, rows: int) -> float:
    """Largest difference of this rank's part from that of whole sequences, in blocks of `rows`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring, "SCORE_ROWS", rows)
        return difference(kind, width)


def difference(kind: str, width: int) -> float:
    group, degree = dist.group.WORLD, dist.get_world_size()
    assert group is not None
    documents = torch.tensor([[0] * 7 + [1] * (LENGTH - 7), [0] * 15 + [1] * (LENGTH - 15)])
    ahead = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    masks = {
        "all": torch.zeros(1, 1, LENGTH, LENGTH, dtype=torch.float64),
        "causal": torch.zeros(LENGTH, LENGTH, dtype=torch.float64).masked_fill(ahead, -torch.inf),
        "documents": document_mask(documents, True, torch.float64),
    }
    whole, here = drawn(width), dist.get_rank()
    wanted = [deal_chunks(tensor, 2, degree)[here] for tensor in expected(whole, masks[kind])]
    positions = [deal_chunks(torch.arange(LENGTH), 0, degree)[rank] for rank in range(degree)]

    def block(rank: int, queries: slice, keys: slice) -> Tensor:
        return document_mask(documents, True, torch.float64, positions[here][queries], positions[rank][keys])

    parts = [deal_chunks(tensor, 2, degree)[here] for tensor in whole]
    query, key, value = (part.clone().requires_grad_() for part in parts[:3])
    settings = RingSettings(group, 0.3, kind == "causal", block if kind == "documents" else None)
    output = ring_attention(query, key, value, settings)
    output.backward(parts[3])
    found = [output.detach(), query.grad, key.grad, value.grad]
    return max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True) if a is not None)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", ["all", "causal", "documents"])
@pytest.mark.parametrize("ranks, width, rows", [(2, 6, 512), (2, 5, 512), (3, 5, 3), (4, 6, 2)])
def test_ring_equals_whole(world_pool: WorldPool, kind: str, ranks: int, width: int, rows: int) -> None:
    """Widths that differ between keys and values have no fused kernel; few rows cut blocks, and the diagonal's too."""
    assert max(world_pool.run(ranks, worst, kind, width, rows)) < 1e-12


def there_and_back() -> bool:
    """Heads for rows and rows for heads undo each other, in values and gradients; a gather has all in order."""
    group, degree, here = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    assert group is not None
    whole = drawn(6)[0]
    part = deal_chunks(whole, 2, degree)[here].requires_grad_()
    exchanged = heads_for_rows(part, group)
    assert torch.equal(exchanged, whole.chunk(degree, 1)[here])
    back = rows_for_heads(exchanged.transpose(1, 2), group).transpose(1, 2)
    back.backward(part.detach())
    gathered = gather_sequence(part, group)
    return (
        torch.equal(back, part)
        and torch.equal(part.grad if part.grad is not None else part, part)
        and torch.equal(gathered, whole)
        and torch.equal(join_chunks(deal_chunks(whole, 2, degree), 2), whole)
    )


@pytest.mark.parametrize("ranks", [2, 4])
def test_exchanges(world_pool: WorldPool, ranks: int) -> None:
    assert all(world_pool.run(ranks, there_and_back))
