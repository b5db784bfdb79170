"""`smp.utils`: what older scripts use of SMP's helpers."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from shardwise.smp.v1.process import state


def get_distribution_axis(param: nn.Parameter) -> int | None:
    """The dim along which tensor ranks hold parts of `param`; None where each has it whole."""
    model = state.model
    if model is None or model.parallel is None or not model.is_distributed_parameter(param):
        return None
    cut = model.parallel.tensor_map[model.names[id(param)]].cut
    assert cut is not None
    return cut.dim


def rmsg(*message: Any) -> str:
    """A line that says which rank wrote it; also printed to stderr."""
    text = f"[rank {state.layout.rank}] {' '.join(map(str, message))}"
    print(text, file=sys.stderr)
    return text
