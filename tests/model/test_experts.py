"""Which modules hold experts, by what their forwards take and do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import DbrxModel

from shardwise.job.schema import Job
from shardwise.model.build import build_model
from shardwise.model.experts import ExpertCall, call_of, expert_capability, expert_matrices, expert_stacks
from shardwise.model.routers import find_routers
from shardwise.testing.toy_configs import toy_config

EXPERTS, HIDDEN, WIDTH = 4, 6, 5


class OneStack(nn.Module):
    """Takes rows grouped by expert."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH))

    def forward(self, hidden_states: Tensor) -> Tensor:
        return torch.bmm(hidden_states.view(EXPERTS, -1, HIDDEN), self.up).flatten(0, 1)


class GroupedByToken(OneStack):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return torch.bmm(hidden_states.view(-1, EXPERTS, HIDDEN).transpose(0, 1), self.up).flatten(0, 1)


class AllOfEachToken(OneStack):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return torch.matmul(hidden_states, self.up).sum(0)


class WithRouter(OneStack):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)


@pytest.mark.parametrize("module", [GroupedByToken, AllOfEachToken, WithRouter])
def test_rows_are_grouped_by_expert_or_it_is_no_stack(module: type[OneStack]) -> None:
    assert call_of(OneStack()) is ExpertCall.DENSE
    assert call_of(module()) is None


class FlatStack(nn.Module):
    """Holds its experts one below the other in a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts, self.width = EXPERTS, WIDTH
        self.up = nn.Parameter(torch.randn(EXPERTS * WIDTH, HIDDEN))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return hidden_states


def test_a_matrix_of_experts_is_told_from_a_layer_beside_them() -> None:
    model = nn.ModuleDict({"experts": FlatStack()})
    assert expert_stacks(model) == {"experts": EXPERTS}
    model["experts"].register_module("beside", nn.Linear(HIDDEN, EXPERTS * WIDTH, bias=False))
    assert expert_stacks(model) == {}, "the layer is for all experts at once"


@pytest.mark.parametrize(
    "family, call, stacks, routers",
    [
        ("dbrx", ExpertCall.ROUTED, 2, 2 if "router_logits" in DbrxModel._can_record_outputs else 0),
        ("jetmoe", ExpertCall.SORTED, 8, 0),
        ("llama4_text", ExpertCall.DENSE, 2, 0),
    ],
)
def test_experts_of_families_without_a_plan(family: str, call: ExpertCall, stacks: int, routers: int) -> None:
    model = build_model(Job.model_validate({"model": {"config": toy_config(family)}}))
    assert expert_capability(model, ("model.layers", "transformer.blocks")).ok
    calls = [call_of(model.get_submodule(name)) for name in expert_stacks(model)]
    assert calls == [call] * stacks
    assert len(find_routers(model)) == routers and not expert_matrices(model)
