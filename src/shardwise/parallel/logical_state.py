"""State that an optimizer keeps beside a parameter, as slices of a logical tensor of its own.

A moment has the parameter's shape and slices. Rows and columns of a factored moment, or scales of blocks, have others,
and ranks that hold different slices of the parameter may hold the same of them. Checkpoints write and read by these
forms, so that such state moves between layouts as parameters do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from shardwise.parallel.tensor_map import ParameterEntry, Region


@dataclass(frozen=True)
class StateForm:
    """State under one key, beside the local slice of a parameter.

    Attributes:
        shape: of the logical tensor.
        local_shape: of what is here.
        regions: what of the logical tensor is here.
        owned: what of it this rank writes, of the ranks that hold different slices of the parameter; together they
            write each element once. Copies of the same slice are shared out elsewhere.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    local_shape: tuple[int, ...]
    regions: tuple[Region, ...]
    owned: tuple[Region, ...]


@runtime_checkable
class KeepsForms(Protocol):
    """An optimizer that says what its state stands for."""

    def forms(self, parameter: nn.Parameter) -> Mapping[str, StateForm]:
        """Return the forms of the state tensors beside a local parameter, by key."""
        ...


def form_of_parameter(entry: ParameterEntry, dtype: torch.dtype) -> StateForm:
    """Return the form of state that has the parameter's shape and slices."""
    local = tuple(entry.local.shape)
    return StateForm(entry.shape, dtype, local, entry.regions, entry.regions)


def averaged_weight(parameter: Tensor, state: Tensor, factor: float) -> Tensor:
    """Return what is evaluated in the place of `parameter`, as `Average` of the job's optimizer says."""
    return state.detach().clone() if factor == 1.0 else parameter + (state - parameter) * factor
