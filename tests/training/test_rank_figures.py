"""Figures of the ranks: those of accelerators travel with loss and norm, those of a CPU are of the whole step."""

from __future__ import annotations

from unittest import mock

import torch
import torch.distributed as dist

from shardwise.collectives.rank_record import StepTimes
from shardwise.testing.world import WorldPool
from shardwise.training import rank_figures
from shardwise.training.rank_figures import Figures, figures_of, own_figures

CPU = torch.device("cpu")


def summed_figures() -> Figures:
    """The figures of ranks that take their CPU for an accelerator, with a peak and a wait of their own."""
    rank = dist.get_rank()
    with (
        mock.patch.object(rank_figures.accelerator, "is_accelerator", lambda device: True),
        mock.patch.object(rank_figures, "peak_memory_bytes", lambda device: (1 << 40) + rank),
        mock.patch.object(rank_figures, "step_times", lambda: StepTimes(0.25 * rank, 0.0)),
    ):
        sums = own_figures(CPU)
    dist.all_reduce(sums)
    return figures_of(sums.tolist())


def test_each_rank_has_its_own_place_in_the_sums(world_pool: WorldPool) -> None:
    expected = {"peak_memory_bytes": [(1 << 40), (1 << 40) + 1], "data_seconds": [0.0, 0.25]}
    assert world_pool.run(2, summed_figures) == [expected, expected]


def test_a_cpu_sends_none_ahead_of_its_update() -> None:
    assert figures_of(own_figures(CPU).tolist()) == {}
