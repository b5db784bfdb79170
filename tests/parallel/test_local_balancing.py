"""Balancing losses of microbatches and sequences: transformers' value, and the gradients that autograd gives it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from shardwise.parallel.local_balancing import LocalBalancing

LAYERS, SEQUENCES, LENGTH, EXPERTS, CHOSEN, COEFFICIENT = 2, 3, 5, 4, 2, 0.01


def drawn_logits() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(SEQUENCES * LENGTH, EXPERTS, dtype=torch.float64) for _ in range(LAYERS)]


def counted(by_sequence: bool, layers: list[Tensor], real: Tensor) -> LocalBalancing:
    """Return the loss of a step of one microbatch, whose sequences are real or padding."""
    local = LocalBalancing(by_sequence, COEFFICIENT, EXPERTS, LAYERS, torch.device("cpu"), torch.float64)
    local.begin(real.sum().double())
    local.begin_microbatch(int(real.sum()))
    for logits in layers:
        local.count(logits, real.repeat_interleave(LENGTH), SEQUENCES, CHOSEN)
    return local


def test_a_microbatchs_loss_is_transformers() -> None:
    layers = drawn_logits()
    local = counted(False, layers, torch.ones(SEQUENCES, dtype=torch.bool))
    expected = load_balancing_loss_func(tuple(layers), EXPERTS, CHOSEN)
    torch.testing.assert_close(local.loss(), expected.double(), rtol=1e-6, atol=0)  # which counts in fp32


@pytest.mark.parametrize("by_sequence", [True, False])
def test_gradients_are_autograds(by_sequence: bool) -> None:
    """Choices are constants, a sequence of padding counts nowhere."""
    layers, real = drawn_logits(), torch.tensor([True, False, True])
    local = counted(by_sequence, layers, real)
    probabilities = [logits.softmax(-1).requires_grad_() for logits in layers]
    choices = [torch.zeros_like(p).scatter_(1, p.topk(CHOSEN).indices, 1.0) for p in probabilities]
    f, p = (
        torch.stack(values).view(LAYERS, SEQUENCES, LENGTH, EXPERTS)[:, real] for values in (choices, probabilities)
    )
    dims = (2,) if by_sequence else (0, 1, 2)
    loss = EXPERTS * (f.mean(dims) * p.mean(dims)).sum(-1).mean()
    torch.testing.assert_close(local.loss(), loss, rtol=1e-12, atol=0)
    (COEFFICIENT * loss).backward()
    rows = real.repeat_interleave(LENGTH)
    for logits, given in zip(layers, probabilities, strict=True):
        gain = local.share_gain(logits, rows, SEQUENCES, CHOSEN, local.current()).expand_as(logits)
        torch.testing.assert_close(gain[rows], given.grad[rows], rtol=1e-12, atol=0)


@pytest.mark.parametrize("by_sequence", [True, False])
def test_what_fills_up_a_row_does_not_count(by_sequence: bool) -> None:
    """The loss is that of transformers with a mask, in the mean over sequences and layers or of all together."""
    layers = drawn_logits()
    mask = torch.tensor([[1] * LENGTH, [1] * 2 + [0] * 3, [1] * 4 + [0]])
    local = LocalBalancing(by_sequence, COEFFICIENT, EXPERTS, LAYERS, torch.device("cpu"), torch.float64)
    local.begin(torch.tensor(3.0).double())
    local.begin_microbatch(SEQUENCES)
    for logits in layers:
        local.count(logits, mask.flatten() > 0, SEQUENCES, CHOSEN)
    parts = [(logits.view(SEQUENCES, LENGTH, -1)[row], mask[row]) for logits in layers for row in range(SEQUENCES)]
    values = [load_balancing_loss_func((logits,), EXPERTS, CHOSEN, of_row[None]) for logits, of_row in parts]
    whole = load_balancing_loss_func(tuple(layers), EXPERTS, CHOSEN, mask)
    expected = torch.stack(values).mean() if by_sequence else whole
    torch.testing.assert_close(local.loss(), expected.double(), rtol=1e-6, atol=0)
