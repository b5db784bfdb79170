"""Experts on sorted rows: the bits of transformers' own forward, and sums of rows with their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GptOssConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from shardwise.kernels import experts as kernels
from shardwise.kernels.experts import SortedExperts, permute_rows, select_rows, sum_rows

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


def test_gradients_of_rows() -> None:
    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    places, order = torch.tensor([2, 0, 2, 2, 1]), torch.tensor([3, 0, 4, 1, 2])
    check = torch.autograd.gradcheck
    assert check(lambda values: select_rows(values, places), random(4, 3))
    assert check(lambda rows: permute_rows(rows, order, order.argsort()), random(5, 3))
    assert check(lambda rows: sum_rows(rows, places, 4), random(5, 3))
    assert check(lambda rows, weights: sum_rows(rows, places, 4, weights), (random(5, 3), random(5)))


def test_rows_of_16_bits_are_summed_in_fp32() -> None:
    rows = torch.full((300, 1), 1.0, dtype=torch.bfloat16)
    assert sum_rows(rows, torch.zeros(300, dtype=torch.int64), 1).item() == 300
