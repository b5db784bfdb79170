"""Numbers below the smallest normal one: 0 in attention with a bias, and as they were everywhere else."""

from __future__ import annotations

import pytest
import torch

from shardwise._torch_compat.tracing import FakeTensorMode
from shardwise.kernels.attention.blockwise import BlockwiseSettings, blockwise_attention


def _kept() -> bool:
    return float(torch.full((), 1e-40) * 1.0) != 0.0


def test_fake_tensors_are_asked_for_no_number() -> None:
    with FakeTensorMode():
        query, key, value = (torch.randn(1, 2, 64, 8, requires_grad=True) for _ in range(3))
        settings = BlockwiseSettings(8**-0.5, causal=True, bias=torch.zeros(1, 2, 1, 64))
        blockwise_attention(query, key, value, settings).sum().backward()
    assert query.grad is not None and query.grad.shape == query.shape


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_probabilities_too_small_to_matter_are_zero_and_nothing_else_is(biased: bool, before: bool) -> None:
    query = torch.zeros(1, 1, 1, 8, requires_grad=True)
    key, value = torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 2, 8)
    value[..., 1, :] = 1.0  # of the key whose probability is exp(-95), which fp32 has as a denormal number only
    bias = torch.tensor([0.0, -95.0]).view(1, 1, 1, 2) if biased else None
    torch.set_flush_denormal(not before)
    try:
        output = blockwise_attention(query, key, value, BlockwiseSettings(8**-0.5, bias=bias))
        assert float(output.detach().max()) == (0.0 if biased else 0.5)
        assert _kept() == before
        output.sum().backward()
        assert _kept() == before
    finally:
        torch.set_flush_denormal(False)
