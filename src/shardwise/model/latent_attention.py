"""Finds multi-head latent attention, whose heads tensor ranks share, by its projections.

Queries, keys and values of all heads are made from narrow latents (DeepSeek-V2, arXiv 2405.04434, section 2.1), which
every rank makes whole. The part of a key that carries positions is one for all heads, and goes straight to each rank's
own. So what makes the latents lies inside of the region of heads: each rank sees its heads' part of the gradients, and
they are summed. An indexer (DeepSeek-V3.2) that chooses keys for all heads is whole in the same way.
"""

from __future__ import annotations

from torch import nn

from shardwise.model.split_rules import COLUMN, ROW
from shardwise.model.tensor_split import TensorSplit

MADE = "kv_a_proj_with_mqa"  # makes the latent of keys and values, and the keys' part with positions
LATENTS = {"q_a_proj", "q_a_layernorm", MADE, "kv_a_layernorm", "indexer"}
OF_HEADS = {"q_proj": COLUMN, "q_b_proj": COLUMN, "kv_b_proj": COLUMN, "o_proj": ROW}
FEWEST = {MADE, "kv_b_proj", "o_proj"}


def latent_attention(model: nn.Module) -> dict[str, dict[str, TensorSplit]]:
    """Return the splits of the modules of each latent attention, by its name; none where it holds anything else."""
    return {name: _splits(name, module) for name, module in model.named_modules() if hasattr(module, MADE)}


def _splits(name: str, attention: nn.Module) -> dict[str, TensorSplit]:
    own = {child for child, module in attention.named_children() if next(module.parameters(), None) is not None}
    own |= {leaf for leaf, _ in attention.named_parameters(recurse=False)}
    if not FEWEST <= own <= LATENTS | OF_HEADS.keys():
        return {}
    whole = {
        f"{name}.{part}"
        for part, module in attention.named_modules()
        if part.partition(".")[0] in LATENTS and next(module.parameters(recurse=False), None) is not None
    }
    return dict.fromkeys(sorted(whole), TensorSplit("partial")) | {
        f"{name}.{child}": split for child, split in OF_HEADS.items() if child in own
    }
