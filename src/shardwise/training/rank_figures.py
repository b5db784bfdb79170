"""Figures of the ranks in a step's record: peak memory, and what they have waited for.

An accelerator's travel with loss and norm, ahead of the update: a host that asked behind it would wait for it. On a
CPU, where nothing goes on beside the host, they are of the whole step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise._torch_compat import accelerator
from shardwise.collectives.names import CollectiveName
from shardwise.collectives.rank_record import step_times
from shardwise.data.batch import moved
from shardwise.observe.memory import peak_memory_bytes

RANK_FIGURES = CollectiveName("figures of the ranks", "world", "all_gather")

Figures = Mapping[str, list[float]]  # by rank


def own_figures(device: torch.device) -> Tensor:
    """Return what, summed over the ranks, are the figures of an accelerator's: of its widest dtype, empty on a CPU."""
    if not accelerator.is_accelerator(device):
        return torch.zeros(0, dtype=torch.float64)
    figures = torch.zeros(dist.get_world_size(), 2, dtype=torch.float64)
    figures[dist.get_rank()] = torch.tensor([peak_memory_bytes(device), step_times().data], dtype=torch.float64)
    return moved(figures.flatten(), device)


def figures_of(sums: Sequence[float]) -> Figures:
    """Return the figures whose sums these are."""
    if not sums:
        return {}
    return {"peak_memory_bytes": [round(peak) for peak in sums[::2]], "data_seconds": [round(x, 6) for x in sums[1::2]]}


def figures_of_step(device: torch.device, seconds: float) -> Figures:
    """Return those of a whole step on a CPU: also seconds that it has computed, and waited in collectives. Collective.

    Args:
        seconds: of the step on this rank.
    """
    times = step_times()
    own = [peak_memory_bytes(device), *(round(1e6 * part) for part in (seconds, times.data, times.communication))]
    message = torch.tensor(own, dtype=torch.int64, device=device)
    answers = [torch.empty_like(message) for _ in range(dist.get_world_size())]
    with RANK_FIGURES:
        dist.all_gather(answers, message)
    peaks, wholes, data, communication = zip(*(answer.tolist() for answer in answers), strict=True)
    parts = zip(wholes, data, communication, strict=True)
    return {
        "peak_memory_bytes": list(peaks),
        "data_seconds": [part / 1e6 for part in data],
        "compute_seconds": [(whole - waited - exchanged) / 1e6 for whole, waited, exchanged in parts],
        "communication_seconds": [part / 1e6 for part in communication],
    }
