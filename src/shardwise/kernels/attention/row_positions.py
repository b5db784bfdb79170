"""The answer to transformers, which asks ahead of every causal mask whether positions start anew inside of a row.

It reads that from the accelerator, so that a host waits in each microbatch. Where a batch has no positions, its own
models number them from first to last: then the answer is known here. A sweep over all types holds that.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import masking_utils

from shardwise.kernels.dropout import active_scope

QUESTION = "find_packed_sequence_indices"


def numbers_positions(model: nn.Module, inputs: Any) -> bool:
    """Return whether `model` is of transformers' own classes, and numbers positions itself with these inputs."""
    own = next((base for base in type(model).__mro__ if not base.__module__.startswith("torch.")), nn.Module)
    given = inputs is None or "position_ids" in inputs
    return own.__module__.startswith("transformers.models.") and not given


def from_values(position_ids: Tensor) -> Tensor | None:
    """Return the number of each position's sequence, or None where rows are one each, as transformers reads it."""
    answer: Tensor | None = _asked(position_ids)
    return answer


def sequence_numbers(position_ids: Tensor) -> Tensor | None:
    """Answer transformers, without its values where they are known."""
    scope = active_scope()
    return None if scope is not None and scope.numbers_positions else from_values(position_ids)


if hasattr(masking_utils, QUESTION):
    _asked = getattr(masking_utils, QUESTION)
    setattr(masking_utils, QUESTION, sequence_numbers)
