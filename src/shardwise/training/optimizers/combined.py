"""Several optimizers that update different parameters, as one: what parameter groups with their own optimizers make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from shardwise.parallel.logical_state import KeepsForms, StateForm
from shardwise.parallel.model import ParallelModel
from shardwise.parallel.tensor_map import ParameterEntry
from shardwise.training.optimizers.slice_optimizer import SliceOptimizer


class CombinedOptimizer(torch.optim.Optimizer):
    """Steps its `members` one after the other; their groups and their state are its own."""

    def __init__(self, members: Sequence[torch.optim.Optimizer]) -> None:
        self.members = members
        groups = [group for member in members for group in member.param_groups]
        super().__init__([{"params": group["params"]} for group in groups], {})
        self.param_groups = groups
        for member in members:
            member.state = self.state

    def place(self, entries: Mapping[nn.Parameter, ParameterEntry], model: ParallelModel | None) -> None:
        """Say where each parameter stands to the members that ask. Collective."""
        for member in self.members:
            if isinstance(member, SliceOptimizer):
                own = {parameter for group in member.param_groups for parameter in group["params"]}
                member.place({local: entry for local, entry in entries.items() if local in own}, model)

    def forms(self, parameter: nn.Parameter) -> Mapping[str, StateForm]:
        """Return the forms of the state beside a parameter; nothing where its optimizer does not say."""
        for member in self.members:
            if any(parameter is own for group in member.param_groups for own in group["params"]):
                return member.forms(parameter) if isinstance(member, KeepsForms) else {}
        return {}

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Let every member step."""
        for member in self.members:
            member.step()
