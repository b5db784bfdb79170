"""Dispatch and combine by themselves: whatever the router chooses, results and gradients are those of whole experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from shardwise.parallel.experts import SharedExperts
from shardwise.testing.world import WorldPool

EXPERTS, HIDDEN = 4, 6
# Experts of each rank's tokens, two a token.
ROUTES = {
    "spread": [[[0, 1], [2, 3], [1, 2]], [[3, 0], [1, 3]]],
    "all tokens on one expert": [[[0, 0], [0, 0]], [[0, 0], [0, 0], [0, 0]]],
    "a rank that gets nothing": [[[0, 1], [1, 0]], [[1, 0]]],
    "a rank without tokens": [[], [[0, 3], [2, 1]]],
}


def whole_experts() -> nn.Module:
    config = Qwen3MoeConfig(hidden_size=HIDDEN, moe_intermediate_size=5, num_experts=EXPERTS)
    config._experts_implementation = "eager"
    experts = Qwen3MoeExperts(config).double()
    generator = torch.Generator().manual_seed(1)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, generator=generator)
    return experts


def inputs_of(rank: int, route: list[list[int]]) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 + rank)
    hidden = torch.randn(len(route), HIDDEN, dtype=torch.float64, generator=generator).requires_grad_()
    weights = torch.rand(len(route), 2, dtype=torch.float64, generator=generator).requires_grad_()
    return hidden, torch.tensor(route, dtype=torch.int64).view(-1, 2), weights


def run_backward(experts: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> list[Tensor]:
    """Return the output and the gradients of hidden states and weights, for a loss that tells all of them apart."""
    output = experts(hidden, index, weights)
    (output * torch.arange(1, HIDDEN + 1)).square().sum().backward()
    assert hidden.grad is not None and weights.grad is not None
    return [output.detach(), hidden.grad, weights.grad]


def shared(routes: list[list[list[int]]]) -> tuple[list[Tensor], list[Tensor]]:
    """Run this rank's tokens with half of the experts; return results and the experts' gradients."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    experts: Any = whole_experts()
    local = EXPERTS // ranks
    for name, parameter in list(experts.named_parameters()):
        experts.register_parameter(name, nn.Parameter(parameter[rank * local : (rank + 1) * local].detach().clone()))
    experts.num_experts = local
    group = dist.group.WORLD
    assert group is not None
    results = run_backward(
        SharedExperts("experts", experts.forward, EXPERTS, group).run, *inputs_of(rank, routes[rank])
    )
    return results, [parameter.grad for parameter in experts.parameters()]


@pytest.mark.parametrize("name", ROUTES)
def test_shared_experts_are_whole_ones(world_pool: WorldPool, name: str) -> None:
    routes = ROUTES[name]
    answers = world_pool.run(2, shared, routes)
    experts = whole_experts()
    for rank, (results, _) in enumerate(answers):
        if not routes[rank]:
            assert [len(value) for value in results] == [0, 0, 0]
            continue
        for value, expected in zip(results, run_backward(experts, *inputs_of(rank, routes[rank])), strict=True):
            torch.testing.assert_close(value, expected)
    for number, parameter in enumerate(experts.parameters()):
        torch.testing.assert_close(torch.cat([gradients[number] for _, gradients in answers]), parameter.grad)
