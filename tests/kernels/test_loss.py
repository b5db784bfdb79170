"""The chunked loss against torch's own cross-entropy on whole logits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from shardwise.job.tasks import IGNORED
from shardwise.kernels.loss import NO_TERMS, LossTerms, count_labels, cross_entropy_sum, linear_cross_entropy
from shardwise.observe.memory import LiveBytes

ROWS, WIDTH, VOCABULARY = 30, 13, 17


def problem(dtype: torch.dtype, bias: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, ROWS // 3, WIDTH, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    offset = torch.randn(VOCABULARY, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(VOCABULARY, (3, ROWS // 3), generator=generator)
    labels[0, ::4] = IGNORED
    return hidden, weight, offset if bias else None, labels


def plain(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
    logits = F.linear(hidden, weight, bias).flatten(0, 1)
    return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("chunk", [1, 7, ROWS, 1000])
def test_value_and_gradients_are_those_of_whole_logits(chunk: int, bias: bool) -> None:
    inputs = problem(torch.float64, bias)
    wanted = [value for value in inputs[:3] if value is not None]
    expected = plain(*inputs)
    loss = linear_cross_entropy(*inputs, chunk=chunk, seed=torch.tensor(0.25, dtype=torch.float64))
    torch.testing.assert_close(loss, expected, rtol=1e-14, atol=0)
    ours = torch.autograd.grad(loss, wanted, torch.tensor(0.25, dtype=torch.float64))
    theirs = torch.autograd.grad(expected, wanted, torch.tensor(0.25, dtype=torch.float64))
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).abs().max() <= 1e-12 * b.abs().max()


@pytest.mark.parametrize("terms", [NO_TERMS, LossTerms(0.2, 0.05)])
def test_weights_of_labels(terms: LossTerms) -> None:
    """A weighted sum is the sum of each label's own loss, times its weight."""
    hidden, weight, bias, labels = problem(torch.float64, True)
    weights = torch.rand(labels.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    loss = linear_cross_entropy(hidden, weight, bias, labels, chunk=7, terms=terms, weights=weights)
    logits, flat = F.linear(hidden, weight, bias).flatten(0, 1), labels.flatten()
    each = [cross_entropy_sum(logits[at : at + 1], flat[at : at + 1], terms) for at in range(len(flat))]
    expected = sum(one * own for one, own in zip(each, weights.flatten(), strict=True))
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
    plain = cross_entropy_sum(F.linear(hidden, weight, bias), labels, terms, weights)
    torch.testing.assert_close(plain, expected, rtol=1e-13, atol=0)
    inputs = [hidden, weight, bias]
    pairs = zip(torch.autograd.grad(loss, inputs), torch.autograd.grad(expected, inputs), strict=True)
    assert all((ours - theirs).abs().max() <= 1e-12 * theirs.abs().max() for ours, theirs in pairs)


@pytest.mark.parametrize("terms", [LossTerms(0.1, 0.0), LossTerms(0.0, 0.01), LossTerms(0.2, 0.05)])
def test_smoothing_and_z_loss(terms: LossTerms) -> None:
    """Against their definitions: targets with a share of every class, and the squared log-normaliser."""
    hidden, weight, bias, labels = problem(torch.float64, True)
    loss = linear_cross_entropy(hidden, weight, bias, labels, chunk=7, terms=terms)
    logits, counted = F.linear(hidden, weight, bias).flatten(0, 1), labels.flatten() != IGNORED
    hot = F.one_hot(labels.flatten().clamp(min=0), VOCABULARY).double()
    wanted = hot * (1 - terms.smoothing) + terms.smoothing / VOCABULARY
    each = -(wanted * logits.log_softmax(-1)).sum(-1) + terms.z_loss * logits.logsumexp(-1).square()
    expected = each[counted].sum()
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(cross_entropy_sum(logits, labels.flatten(), terms), expected, rtol=1e-13, atol=0)
    inputs = [hidden, weight, bias]
    pairs = zip(torch.autograd.grad(loss, inputs), torch.autograd.grad(expected, inputs), strict=True)
    assert all((ours - theirs).abs().max() <= 1e-12 * theirs.abs().max() for ours, theirs in pairs)


def test_another_gradient_than_the_seed_is_still_right() -> None:
    inputs = problem(torch.float64, True)
    loss = linear_cross_entropy(*inputs, chunk=8, seed=2.0)
    (ours,) = torch.autograd.grad(3.0 * loss, [inputs[0]])
    (theirs,) = torch.autograd.grad(3.0 * plain(*inputs), [inputs[0]])
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_accumulates_in_fp32(dtype: torch.dtype) -> None:
    inputs = problem(dtype, True)
    loss = linear_cross_entropy(*inputs, chunk=4)
    loss.backward()
    assert loss.dtype == torch.float32 and inputs[1].grad is not None and inputs[1].grad.dtype == dtype
    hidden, weight, bias, labels = problem(dtype, True)
    expected = cross_entropy_sum(F.linear(hidden, weight, bias), labels)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    assert weight.grad is not None
    assert (inputs[1].grad - weight.grad).abs().max() <= 0.02 * weight.grad.abs().max()


def test_no_counted_label_gives_zero_and_zero_gradients() -> None:
    hidden, weight, bias, labels = problem(torch.float64, True)
    loss = linear_cross_entropy(hidden, weight, bias, torch.full_like(labels, IGNORED), chunk=8)
    loss.backward()
    assert loss.item() == 0.0
    assert all(float(value.grad.abs().max()) == 0.0 for value in (hidden, weight, bias))
    assert int(count_labels(torch.full_like(labels, IGNORED))) == 0 and int(count_labels(labels)) == ROWS - 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_no_rows_at_all_give_zero_and_zero_gradients(dtype: torch.dtype) -> None:
    _, weight, bias, _ = problem(dtype, True)
    hidden = torch.empty(2, 0, WIDTH, dtype=dtype, requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, bias, torch.empty(2, 0, dtype=torch.int64), chunk=8)
    loss.backward()
    assert loss.item() == 0.0 and hidden.grad.shape == hidden.shape
    assert all(float(value.grad.abs().max()) == 0.0 for value in (weight, bias))


def test_the_seed_keeps_small_shares_in_the_range_of_fp16() -> None:
    """Shares of 1e-9 are 0 in fp16; a loss scale of 2**16, which the seed brings, makes them numbers."""
    hidden = torch.eye(2, dtype=torch.float16).requires_grad_()
    weight = torch.tensor([[20.0, 0.0], [0.0, 20.0]], dtype=torch.float16).requires_grad_()
    labels = torch.tensor([0, 1])
    seed = torch.tensor(2.0**16)
    loss = linear_cross_entropy(hidden, weight, None, labels, chunk=2, seed=seed)
    (ours,) = torch.autograd.grad(loss, [weight], seed)
    assert float(ours[1, 0]) == pytest.approx(2.0**16 / (1 + math.exp(20)), rel=2e-3)


def test_without_gradients_nothing_is_kept_for_backward() -> None:
    inputs = problem(torch.float64, True)
    with torch.no_grad():
        loss = linear_cross_entropy(*inputs, chunk=8)
    assert not loss.requires_grad and loss.grad_fn is None
    torch.testing.assert_close(loss, plain(*inputs).detach(), rtol=1e-14, atol=0)


def test_peak_memory_never_holds_whole_logits() -> None:
    rows, width, vocabulary, chunk = 2048, 8, 512, 64
    hidden = torch.randn(rows, width, requires_grad=True)
    weight = torch.randn(vocabulary, width, requires_grad=True)
    labels = torch.randint(vocabulary, (rows,))
    whole = rows * vocabulary * 4
    with LiveBytes(hidden, weight, labels) as memory:
        linear_cross_entropy(hidden, weight, None, labels, chunk=chunk).backward()
    small = 4 * (4 * hidden.numel() + 4 * weight.numel()) + 8 * rows + 6 * chunk * vocabulary * 4
    assert memory.peak < small < whole / 2
    with LiveBytes(hidden, weight, labels) as control:
        plain(hidden.unsqueeze(0), weight, None, labels.unsqueeze(0)).backward()
    assert control.peak > whole


def test_logits_of_one_chunk_are_gone_before_the_next() -> None:
    rows, width, vocabulary, chunk = 256, 2, 4096, 64
    hidden, weight = (torch.randn(size, width, requires_grad=True) for size in (rows, vocabulary))
    labels = torch.randint(vocabulary, (rows,))
    with LiveBytes(hidden, weight, labels) as memory:
        linear_cross_entropy(hidden, weight, None, labels, chunk=chunk).backward()
    one = chunk * vocabulary * 4
    rest = 8 * (hidden.nbytes + weight.nbytes)
    assert one < memory.peak < 1.5 * one + rest < 2 * one
