"""apex's collectives on lists of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from shardwise.smp.doors.stubs.apex.kernels import flatten, unflatten


def flat_dist_call(
    tensors: Sequence[Tensor], call: Callable[..., Any], extra_args: Sequence[Any] | None = None
) -> None:
    """`call` once on the elements of all `tensors`, which get its result."""
    flat = flatten(tensors)
    call(flat, *(extra_args or ()))
    for tensor, part in zip(tensors, unflatten(flat, tensors)):
        tensor.copy_(part)
