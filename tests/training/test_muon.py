"""Muon in one process is torch.optim.Muon bit by bit; by blocks it is the same but for rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.kernels.newton_schulz import newton_schulz, newton_schulz_of_blocks
from shardwise.model.matrices import Matrix, matrices_of
from shardwise.plan.draft import World
from shardwise.plan.orthogonalization import BLOCKS, EVERY_RANK, ONE_RANK, Slices, costs
from shardwise.plan.plan import resolve
from shardwise.testing import oracle_muon
from shardwise.training.optimizers.muon import COEFFICIENTS, Muon
from tests.parity.jobs import facts_of
from tests.parity.test_muon import muon_job

SHAPES = ((5, 8), (8, 5), (6, 6), (1, 7))


@pytest.mark.parametrize("options", [{}, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 3}])
def test_it_is_torchs_bit_by_bit(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    theirs = [nn.Parameter(weight.detach().clone()) for weight in ours]
    optimizers = Muon(ours, lr=0.02, **options), torch.optim.Muon(theirs, lr=0.02, **options)
    for _ in range(3):
        for own, other in zip(ours, theirs, strict=True):
            own.grad = torch.randn_like(own)
            other.grad = own.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert all(torch.equal(own, other) for own, other in zip(ours, theirs, strict=True))


def test_the_oracle_is_torchs_but_for_rounding() -> None:
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    theirs = [nn.Parameter(weight.detach().clone()) for weight in ours]
    groups = [{"params": [weight], "projections": oracle_muon.Projections("")} for weight in ours]
    optimizers = oracle_muon.Muon(groups, lr=0.02), torch.optim.Muon(theirs, lr=0.02)
    for own, other in zip(ours, theirs, strict=True):
        own.grad = torch.randn_like(own)
        other.grad = own.grad.clone()
    for optimizer in optimizers:
        optimizer.step()
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)


def test_blocks_are_the_whole_but_for_rounding() -> None:
    torch.manual_seed(0)
    matrix = torch.randn(3, 11, dtype=torch.float64)
    whole = newton_schulz(matrix, COEFFICIENTS, 5, 1e-7)
    sizes = (4, 0, 7)
    # All blocks in one process: each sum is taken over the three of them.
    parts = newton_schulz_of_blocks(
        matrix.split(sizes, 1),
        lambda each: [sum(each)] * len(each),
        COEFFICIENTS,
        5,
        1e-7,  # type: ignore[list-item]
    )
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("shape", "slices", "compute", "expected"),
    [
        ((4096, 8), Slices(4, 1, share_larger=True), "fp32", BLOCKS),
        ((4096, 4096), Slices(4, 1, share_larger=True), "bf16", ONE_RANK),
        ((64, 64), Slices(1, 4, share_larger=False), "fp32", EVERY_RANK),
    ],
)
def test_the_cheapest_way(shape: tuple[int, int], slices: Slices, compute: str, expected: str) -> None:
    ways = costs(Matrix(shape, (slice(0, shape[0]),)), slices, 5, compute)
    assert min(ways, key=lambda way: ways[way].total("cuda")) == expected


def test_a_rank_works_for_its_stage_alone(corpora: Path) -> None:
    """Copies on every rank do everything: 4k2l + 2k3 FLOPs an iteration, of the matrices of the rank's stage."""
    plans = {}
    for stages in (1, 2):
        job = muon_job(corpora, parallel={"pipeline_parallel_degree": stages})
        facts = facts_of(job)
        plans[stages] = resolve(job, World(stages, "cpu", stages), facts)
    matrices = [matrix for name in plans[1].orthogonalized for matrix in matrices_of(facts, name)]
    whole = sum(5 * (4 * min(m.shape) ** 2 * max(m.shape) + 2 * min(m.shape) ** 3) for m in matrices)
    assert plans[1].orthogonalization == (0.0, whole) and plans[2].orthogonalization == (0.0, whole / 2)


def test_what_torch_refuses_is_refused() -> None:
    for options in ({"ns_steps": 100}, {"adjust_lr_fn": "other"}, {"momentum": -1.0}, {"ns_coefficients": (1.0, 2.0)}):
        with pytest.raises(ValueError, match=next(iter(options))):
            Muon([nn.Parameter(torch.zeros(2, 2))], **options)  # type: ignore[arg-type]
