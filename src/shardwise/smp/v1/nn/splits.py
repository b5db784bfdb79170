"""Tensor splits of `smp.nn`'s modules over tensor ranks.

Norms and residuals stand inside of attention and MLP modules, on whole activations; so every projection is a region of
its own.
"""

from __future__ import annotations

from math import gcd

from torch import nn

from shardwise.model.tensor_split import TensorSplit
from shardwise.smp.v1.nn.transformer import DistributedAttentionLayer, DistributedTransformerOutputLayer

COLUMN, ROW = TensorSplit("column", 0, alone=True), TensorSplit("row", 1)
SPLITS_BY_CLASS: dict[type[nn.Module], dict[str, TensorSplit]] = {
    DistributedAttentionLayer: {"query": COLUMN, "key": COLUMN, "value": COLUMN, "dense": ROW},
    DistributedTransformerOutputLayer: {"dense1": COLUMN, "dense2": ROW},
}


def tensor_splits(model: nn.Module) -> dict[str, TensorSplit]:
    """Return module name -> split of the distributed modules of `model`."""
    return {
        f"{name}.{part}": split
        for name, module in model.named_modules()
        for module_class, parts in SPLITS_BY_CLASS.items()
        if isinstance(module, module_class)
        for part, split in parts.items()
    }


def common_heads(model: nn.Module) -> int:
    """Return the number of heads that tensor ranks can share in all attention layers; 0 where there is none."""
    layers = [module for module in model.modules() if isinstance(module, DistributedAttentionLayer)]
    return gcd(*(layer.query.out_features // layer.head_size for layer in layers))
