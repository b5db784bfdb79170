"""BigBird and its encoder-decoder: block-sparse attention, and whole attention of short sequences."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwise.model.family import Family


def _whole_attention_of_short_sequences(model: nn.Module, sequence_length: int) -> None:
    """Replace attention by whole attention where the first forward would: stages lack some of what it replaces."""
    config: Any = model.config
    fewest_blocks = 5 + 2 * config.num_random_blocks  # global, sliding and random ones
    if sequence_length > fewest_blocks * config.block_size:
        return
    for module in list(model.modules()):
        set_type: Any = getattr(module, "set_attention_type", None)
        if set_type is not None:
            with torch.device("meta"):
                set_type("original_full")


FAMILY = Family(("big_bird", "bigbird_pegasus"), settle=_whole_attention_of_short_sequences)
