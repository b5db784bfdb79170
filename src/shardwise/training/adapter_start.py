"""The start of adapters that depends on more than a seed: DoRA's magnitudes are lengths of rows of the base."""

from __future__ import annotations

import torch

from shardwise.model.adapters import MAGNITUDE
from shardwise.parallel.model import ParallelModel


@torch.no_grad()
def start_adapters(model: ParallelModel) -> None:
    """Give magnitudes the lengths of the rows that they start with, once the base has its weights. Collective."""
    for layer, adapter in model.facts.adapters.items():
        name = f"{layer}.{MAGNITUDE}.weight"
        if adapter.has_magnitude and name in model.tensor_map.names:
            weight = model.tensor_map[f"{layer}.weight"].whole()
            rows = weight.T if adapter.transposed else weight
            model.tensor_map[name].store(torch.linalg.norm(rows, dim=1))
