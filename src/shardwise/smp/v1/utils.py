"""`smp.utils`: SMP's helpers that older scripts use."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from shardwise.smp.v1.model import DistributedModel
from shardwise.smp.v1.session import state


def get_distribution_axis(param: nn.Parameter) -> int | None:
    """Return the dim along which tensor ranks hold parts of `param`; None where each has it whole."""
    model = state.model
    return model._smp.inspection.split_dim(param) if isinstance(model, DistributedModel) else None


def rmsg(*message: Any) -> str:
    """Return a line that says which rank wrote it, also printed to stderr."""
    text = f"[rank {state.layout.rank}] {' '.join(map(str, message))}"
    print(text, file=sys.stderr)
    return text
