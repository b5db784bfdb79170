"""Exponential moving average of the trained weights (EMA): every rank averages the slices that it holds.

It is torch's `AveragedModel` with `get_ema_multi_avg_fn(decay)`: the first update copies the weights, each later one
moves the average by `1 - decay` of the way to them. An update follows every step that was not skipped. What is frozen
has no average, and buffers are the model's own. Ranks that hold the same slice average the same numbers, so that no
communication is needed and the averages are equal on every layout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.parallel.tensor_map import ParameterEntry, TensorMap


class AveragedWeights:
    """The averages of this rank's slices.

    Attributes:
        entries: the trained parameters of which this rank holds something.
        values: average by name, laid out as the entry's local tensor; empty before the first update.
    """

    def __init__(self, tensor_map: TensorMap, decay: float) -> None:
        self.entries: list[ParameterEntry] = [
            entry for entry in tensor_map if entry.parameter.requires_grad and entry.local.numel()
        ]
        self.values: dict[str, Tensor] = {}
        self.decay = decay
        self.in_place = False  # the model has the averages, and `values` the weights

    @torch.no_grad()
    def update(self) -> None:
        """Average the weights of a step that was taken."""
        known = [entry for entry in self.entries if entry.name in self.values]
        if known:
            averages = [self.values[entry.name] for entry in known]
            torch._foreach_lerp_(averages, [entry.local for entry in known], 1 - self.decay)
        for entry in self.entries:
            if entry.name not in self.values:
                self.values[entry.name] = entry.local.clone()

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange weights and averages, one tensor at a time; a second time they are as before, bit by bit."""
        self.in_place = not self.in_place
        for entry in self.entries:
            if entry.name in self.values:
                weight = entry.local.clone()
                entry.local.copy_(self.values[entry.name])
                self.values[entry.name].copy_(weight)

    @property
    def bytes(self) -> int:
        """Bytes of the averages on this rank."""
        return sum(value.numel() * value.element_size() for value in self.values.values())
