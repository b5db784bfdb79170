"""How the distributed modules are split over tensor ranks."""

from __future__ import annotations

from torch import nn

from shardwise.families.facts import TensorSplit


def tensor_splits(model: nn.Module) -> dict[str, TensorSplit]:
    """Module name -> how it is split, of the distributed modules of `model`; nothing where there are none."""
    return {}
