"""Experts on sorted rows: the bits of transformers' own forward, and sums of rows with their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GptOssConfig, Llama4TextConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.jetmoe.modeling_jetmoe import JetMoeParallelExperts
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from shardwise.kernels import experts as kernels
from shardwise.kernels.experts import SortedExperts, select_rows, sum_rows
from shardwise.model.experts import ExpertCall, call_of

COUNTS = [3, 0, 5, 1]


def plain() -> nn.Module:
    return Qwen3MoeExperts(Qwen3MoeConfig(hidden_size=8, moe_intermediate_size=12, num_experts=len(COUNTS)))


def transposed_with_biases() -> nn.Module:
    return GptOssExperts(GptOssConfig(hidden_size=8, intermediate_size=12, num_local_experts=len(COUNTS)))


def outcome(experts: Any, stack: nn.Module, rows: Tensor, *arguments: Tensor) -> list[Tensor]:
    """Return the output and all gradients."""
    rows = rows.clone().requires_grad_()
    stack.zero_grad()
    output = experts(rows, *arguments)
    output.square().sum().backward()
    return [output.detach(), rows.grad, *(parameter.grad for parameter in stack.parameters())]  # type: ignore[list-item]


@pytest.mark.parametrize("make", [plain, transposed_with_biases])
@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
def test_sorted_rows_give_what_the_stack_gives(make: Any, implementation: str) -> None:
    stack: Any = make()
    stack.config._experts_implementation = implementation
    generator = torch.Generator().manual_seed(0)
    for parameter in stack.parameters():
        nn.init.normal_(parameter, generator=generator)
    rows = torch.randn(sum(COUNTS), 8, generator=generator)
    counts = torch.tensor(COUNTS)
    numbers = torch.arange(len(COUNTS)).repeat_interleave(counts)[:, None]
    experts = SortedExperts(stack, stack.forward)
    kernel = next(kernel for kernel in kernels.KERNELS if kernel.serves(experts, rows))
    assert (kernel.name == "grouped products") == (implementation == "grouped_mm")
    expected = outcome(stack, stack, rows, numbers, torch.ones(len(rows), 1))
    torch.testing.assert_close(outcome(experts, stack, rows, counts), expected)


def of_llama4() -> nn.Module:
    return Llama4TextExperts(Llama4TextConfig(hidden_size=8, intermediate_size=12, num_local_experts=len(COUNTS)))


def of_jetmoe() -> nn.Module:
    return JetMoeParallelExperts(len(COUNTS), 8, 12)


def one_by_one(stack: Any, rows: Tensor) -> Tensor:
    """Return what each expert makes of its rows, from the definition."""
    parts = rows.split(COUNTS)
    if isinstance(stack, JetMoeParallelExperts):
        return torch.cat([part @ weight.T for part, weight in zip(parts, stack.weight, strict=True)])
    halves = [(part @ weight).chunk(2, -1) for part, weight in zip(parts, stack.gate_up_proj, strict=True)]
    inner = [up * nn.functional.silu(gate) for gate, up in halves]
    return torch.cat([part @ weight for part, weight in zip(inner, stack.down_proj, strict=True)])


@pytest.mark.parametrize("make, call", [(of_jetmoe, ExpertCall.SORTED), (of_llama4, ExpertCall.DENSE)])
def test_sorted_rows_of_stacks_that_no_router_calls(make: Any, call: ExpertCall) -> None:
    stack: Any = make().double()
    for parameter in stack.parameters():
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))
    assert call_of(stack) is call
    rows = torch.randn(sum(COUNTS), 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = outcome(lambda rows: one_by_one(stack, rows), stack, rows)
    ours = outcome(SortedExperts(stack, stack.forward, call), stack, rows, torch.tensor(COUNTS))
    torch.testing.assert_close(ours, expected)


def test_gradients_of_rows() -> None:
    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    places = torch.tensor([2, 0, 2, 2, 1])
    check = torch.autograd.gradcheck
    assert check(lambda values: select_rows(values, places), random(4, 3))
    assert check(lambda rows: sum_rows(rows, places, 4), random(5, 3))
    assert check(lambda rows, weights: sum_rows(rows, places, 4, weights), (random(5, 3), random(5)))


def test_rows_of_16_bits_are_summed_in_fp32() -> None:
    rows = torch.full((300, 1), 1.0, dtype=torch.bfloat16)
    assert sum_rows(rows, torch.zeros(300, dtype=torch.int64), 1).item() == 300
