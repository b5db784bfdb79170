"""How the engine splits `smp.nn`'s modules over tensor ranks.

Norms and residuals stand inside of attention and MLP modules, on whole activations; so every projection is a region of
its own.
"""

from __future__ import annotations

from math import gcd

from torch import nn

from shardwise.model.facts import TensorSplit
from shardwise.smp.v1.nn.transformer import DistributedAttentionLayer, DistributedTransformerOutputLayer

COLUMN, ROW = TensorSplit("column", 0, alone=True), TensorSplit("row", 1)
KINDS: dict[type[nn.Module], dict[str, TensorSplit]] = {
    DistributedAttentionLayer: {"query": COLUMN, "key": COLUMN, "value": COLUMN, "dense": ROW},
    DistributedTransformerOutputLayer: {"dense1": COLUMN, "dense2": ROW},
}


def tensor_splits(model: nn.Module) -> dict[str, TensorSplit]:
    """Module name -> how it is split, of the distributed modules of `model`; nothing where there are none."""
    return {
        f"{name}.{part}": split
        for name, module in model.named_modules()
        for kind, parts in KINDS.items()
        if isinstance(module, kind)
        for part, split in parts.items()
    }


def common_heads(model: nn.Module) -> int:
    """The heads that tensor ranks can share in every distributed attention layer of `model`; 0 where there is none."""
    layers = [module for module in model.modules() if isinstance(module, DistributedAttentionLayer)]
    return gcd(*(layer.query.out_features // layer.head_size for layer in layers))
