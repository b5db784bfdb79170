"""The start of adapters that depends on more than a seed: on the base, whose rows' lengths are DoRA's magnitudes, and
on the directory of an adapter that is trained on."""

from __future__ import annotations

import torch

from shardwise.checkpoint.adapters import read_adapter
from shardwise.model.adapters import MAGNITUDE
from shardwise.parallel.model import ParallelModel


@torch.no_grad()
def start_adapters(model: ParallelModel) -> None:
    """Give adapters what they start with, once the base has its weights. Collective.

    Raises:
        ModelError: the adapter that the job starts from does not fit its model.
    """
    for layer, adapter in model.facts.adapters.items():
        name = f"{layer}.{MAGNITUDE}.weight"
        if adapter.has_magnitude and name in model.tensor_map.names:
            weight = model.tensor_map[f"{layer}.weight"].whole().to(model.parameter_dtype(f"{layer}.weight"))
            rows = weight.T if adapter.transposed else weight
            model.tensor_map[name].store(torch.linalg.norm(rows, dim=1))
    path = model.plan.job.adapter.path
    if path is not None:
        read_adapter(model, path)
