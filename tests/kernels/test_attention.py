"""The door of attention: every kernel that runs here against the eager one, whatever is hidden, added or dropped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.errors import KernelError
from shardwise.job.attention_kernels import KERNELS
from shardwise.kernels.attention import masks
from shardwise.kernels.attention.dispatch import attention
from shardwise.kernels.dropout import DropoutScope, dropout_scope
from shardwise.model.attention_choice import AttentionNeeds, kernel_supports
from shardwise.observe.memory import LiveBytes

BATCH, HEADS, GROUPS, LENGTH, SIZE = 2, 4, 2, 20, 6
DOCUMENTS = torch.tensor([[0] * 7 + [1] * (LENGTH - 7), [0] * 15 + [1] * (LENGTH - 15)])
PADDING = torch.arange(LENGTH) < torch.tensor([[LENGTH], [13]])
CASES: dict[str, dict[str, Any]] = {
    "all": {},
    "causal": {"causal": True},
    "padding": {"padding": PADDING},
    "documents": {"causal": True, "documents": DOCUMENTS},
    "window": {"causal": True, "window": 3},
    "both sides": {"window": 4},
    "documents, window, padding": {"causal": True, "documents": DOCUMENTS, "window": 3, "padding": PADDING},
    "alibi": {"causal": True, "alibi": torch.tensor([0.5, 0.25, 0.125, 0.0625])},
    "alibi, documents": {"causal": True, "documents": DOCUMENTS, "alibi": torch.tensor([0.5, 0.25, 0.1, 0.0])},
    "bias": {"bias": torch.linspace(-1, 1, LENGTH * LENGTH).view(1, 1, LENGTH, LENGTH), "window": 5},
    "cap": {"causal": True, "softcap": 0.7, "documents": DOCUMENTS},
    "scale": {"causal": True, "scale": 0.9},
}
RUNNABLE = ("flash", "blockwise", "sdpa", "flex")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that cut the toys' sequences, unevenly at the end."""
    monkeypatch.setattr(masks, "BLOCK", 8)


def tensors(dtype: torch.dtype, length: int = LENGTH, value: int = SIZE) -> list[Tensor]:
    """Query, key, value and the output's gradient."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(HEADS, SIZE), (GROUPS, SIZE), (GROUPS, value), (HEADS, value)]
    return [torch.randn(BATCH, h, length, d, generator=generator, dtype=torch.float64).to(dtype) for h, d in shapes]


def needs(case: dict[str, Any], dtype: str = "fp64", gradient: bool = True, value: int = SIZE) -> AttentionNeeds:
    """What a kernel has to be able to do for a case."""
    masked = bool({"padding", "documents", "window"} & set(case))
    bias = "keys" if "alibi" in case else "scores" if "bias" in case else ""
    return AttentionNeeds("cpu", dtype, masked, bias, "softcap" in case, False, SIZE, value, gradient)


def both(kernel: str, case: dict[str, Any], dtype: torch.dtype, value: int = SIZE) -> list[Tensor]:
    """Output and gradients; rows of padding are left out, for they may see nothing."""
    query, key, values, gradient = tensors(dtype, value=value)
    inputs = [each.requires_grad_() for each in (query, key, values)]
    output = attention(*inputs, kernel=kernel, **case)
    counted = PADDING[:, None, :, None] if "padding" in case else torch.tensor(True)
    output = output.masked_fill(~counted, 0.0)
    output.backward(gradient)
    return [output.detach(), *(each.grad for each in inputs if each.grad is not None)]


def pairs() -> Iterator[tuple[str, str]]:
    """Kernels and cases that this machine can run forwards and backwards."""
    for name in CASES:
        for kernel in KERNELS:
            if kernel.name in RUNNABLE and kernel_supports(kernel, needs(CASES[name])).ok:
                yield kernel.name, name


@pytest.mark.sampled(15)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("kernel, name", list(pairs()))
def test_forward_and_gradients_are_those_of_eager(kernel: str, name: str, dtype: torch.dtype) -> None:
    found, wanted = both(kernel, CASES[name], dtype), both("eager", CASES[name], dtype)
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours - theirs).abs().max() <= TOLERANCE[dtype] * theirs.abs().max()


def test_keys_of_a_group_are_kept_once() -> None:
    query, key, value, _ = tensors(torch.float32)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        attention(query.requires_grad_(), key.requires_grad_(), value.requires_grad_(), causal=True, kernel="sdpa")
    assert {tensor.data_ptr() for tensor in (query, key, value)} <= {tensor.data_ptr() for tensor in kept}


def test_gradients_of_a_large_group_add_up_in_fp32() -> None:
    """32 heads read one head's keys: in bf16 their gradients' sum is off by 1 %, from repeated keys by 0.3 %."""
    generator = torch.Generator().manual_seed(1)
    heads = (32, 1, 1, 32)
    drawn = [torch.randn(1, n, 64, 32, generator=generator).bfloat16() for n in heads]
    found = []
    for dtype in (torch.bfloat16, torch.float64):
        query, key, value, gradient = (tensor.to(dtype, copy=True).requires_grad_() for tensor in drawn)
        attention(query, key, value, causal=True, kernel="sdpa").backward(gradient.detach())
        found.append((key.grad.double(), value.grad.double()))  # type: ignore[union-attr]
    for measured, exact in zip(*found, strict=True):
        assert (measured - exact).norm() / exact.norm() < 6e-3


def test_values_of_another_size() -> None:
    found, wanted = (both(kernel, CASES["documents"], torch.float64, value=5) for kernel in ("blockwise", "eager"))
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["causal", "documents", "alibi", "cap"])
def test_flex_forward(name: str) -> None:
    """On a CPU FlexAttention has no backward, which the table knows."""
    query, key, value, _ = tensors(torch.float32)
    found = attention(query, key, value, kernel="flex", **CASES[name])
    torch.testing.assert_close(found, attention(query, key, value, kernel="eager", **CASES[name]), rtol=0, atol=1e-5)
    with pytest.raises(KernelError, match="no backward on cpu"):
        attention(query.requires_grad_(), key, value, kernel="flex", **CASES[name])


def reaches(case: dict[str, Any], kernel: str, changed: int) -> list[int]:
    """Queries of the second row whose output another key and value at `changed` moves."""
    query, key, value, _ = tensors(torch.float64)
    before = attention(query, key, value, kernel=kernel, **case)
    key, value = key.clone(), value.clone()
    key[:, :, changed] += 1
    value[:, :, changed] -= 1
    moved = (attention(query, key, value, kernel=kernel, **case) - before).abs().amax((1, 3))[1] > 1e-9
    return moved.nonzero().flatten().tolist()


@pytest.mark.parametrize("kernel", ["auto", "blockwise", "sdpa", "eager"])
def test_what_another_key_reaches(kernel: str) -> None:
    last = list(range(LENGTH))
    assert reaches(CASES["causal"], kernel, 4) == last[4:]
    assert reaches(CASES["documents"], kernel, 4) == last[4:15]  # its document ends at 15
    assert reaches(CASES["window"], kernel, 4) == [4, 5, 6]
    assert reaches(CASES["both sides"], kernel, 9) == last[6:13]
    assert reaches(CASES["padding"], kernel, 13) == []
    assert reaches(CASES["alibi"], kernel, 4) == last[4:]


@pytest.mark.parametrize("kernel", ["blockwise", "sdpa"])
def test_alibi_is_a_slope_of_the_distance(kernel: str) -> None:
    """With equal scores the weight of a key falls by exp(-slope) a position."""
    query, key = torch.zeros(1, 1, 9, 4), torch.zeros(1, 1, 9, 4)
    weights = attention(
        query, key, torch.eye(9).view(1, 1, 9, 9), causal=True, alibi=torch.tensor([0.3]), kernel=kernel
    )
    ratios = weights[0, 0, -1, 1:] / weights[0, 0, -1, :-1]
    torch.testing.assert_close(ratios, torch.full((8,), 0.3).exp(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("kernel", ["blockwise", "eager"])
def test_products_beyond_fp16(kernel: str) -> None:
    """Scores before their scale and the gradients of weights leave the range of fp16, and come back in fp32."""
    case = {"causal": True, "documents": DOCUMENTS, "softcap": 30.0, "scale": 1e-5}

    def outcome(dtype: torch.dtype, kernel: str) -> list[Tensor]:
        scaled = zip(tensors(torch.float64), (300, 300, 300, 300), strict=True)
        query, key, value, gradient = ((each * factor).half().to(dtype) for each, factor in scaled)
        inputs = [each.requires_grad_() for each in (query, key, value)]
        output = attention(*inputs, kernel=kernel, **case)
        output.backward(gradient)
        return [output.detach(), *(each.grad for each in inputs if each.grad is not None)]

    wanted = outcome(torch.float64, "eager")
    assert not (tensors(torch.float16)[0] * 300 @ tensors(torch.float16)[0].mT * 300).isfinite().all()
    for ours, theirs in zip(outcome(torch.float16, kernel), wanted, strict=True):
        assert (ours - theirs).abs().max() <= 1e-2 * theirs.abs().max()


def test_a_query_that_sees_nothing_gets_zeros_and_no_gradient() -> None:
    query, key, value, gradient = tensors(torch.float64)
    seen = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    seen[0] = True
    inputs = [each.requires_grad_() for each in (query, key, value)]
    output = attention(*inputs, padding=seen, kernel="blockwise")
    output.backward(gradient)
    assert float(output[1].detach().abs().max()) == 0.0
    assert all(float(each.grad[1].abs().max()) == 0.0 for each in inputs if each.grad is not None)
    assert all(bool(each.grad.isfinite().all()) for each in inputs if each.grad is not None)


# --- dropout


def dropout_factors(kernel: str, step: int, p: float, case: dict[str, Any]) -> list[Tensor]:
    with dropout_scope(DropoutScope(0, step, torch.tensor([5, 9]))):
        return both(kernel, {**case, "dropout": p}, torch.float64)


@pytest.mark.parametrize("name", ["causal", "documents", "alibi", "cap"])
def test_blocks_drop_what_eager_drops(name: str) -> None:
    for ours, theirs in zip(
        *(dropout_factors(kernel, 3, 0.3, CASES[name]) for kernel in ("blockwise", "eager")), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    other = dropout_factors("blockwise", 4, 0.3, CASES[name])[0]
    assert not torch.allclose(other, dropout_factors("blockwise", 3, 0.3, CASES[name])[0])


@pytest.mark.parametrize("kernel", ["blockwise", "sdpa"])
def test_keep_rate_and_gradient_of_dropout(kernel: str) -> None:
    """Equal scores and values of one: the output is the kept share / keep, its gradient to the values likewise."""
    torch.manual_seed(0)
    length, p = 128, 0.2
    query = torch.zeros(2, 4, length, 8)
    value = torch.ones(2, 4, length, 8, requires_grad=True)
    output = attention(query, query, value, dropout=p, kernel=kernel)
    output.sum().backward()
    assert value.grad is not None
    sigma = (p / (1 - p) / (2 * 4 * length * length)) ** 0.5
    assert abs(float(output.mean()) - 1) < 5 * sigma
    assert abs(float(value.grad.mean()) - 1) < 5 * sigma
    assert float(output.std()) == pytest.approx((p / (1 - p) / length) ** 0.5, rel=0.1)


# --- memory


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["causal", "documents", "window", "alibi"])
def test_memory_grows_linearly(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peak of forward and backward at 256, 512, 1k, 2k tokens: doubling the sequence at most doubles it."""
    monkeypatch.setattr(masks, "BLOCK", 128)
    peaks = [peak(name, length) for length in (256, 512, 1024, 2048)]
    one_block = 4 * 8 * 128 * 128  # what does not grow: one block's mask and bias
    assert all(later <= 2.1 * earlier + one_block for earlier, later in pairwise(peaks))
    assert peaks[-1] < 4 * 2048 * 2048 / 2  # of one head's scores in fp32, half


def peak(name: str, length: int) -> int:
    positions = torch.arange(length)
    cases = {
        "causal": {},
        "documents": {"documents": (positions // 175).unsqueeze(0)},
        "window": {"window": 75},
        "alibi": {"alibi": torch.tensor([0.01])},
    }
    inputs = [torch.randn(1, 1, length, 16, requires_grad=True) for _ in range(3)]
    with LiveBytes(*inputs) as memory:
        attention(*inputs, causal=True, **cases[name]).sum().backward()
    return memory.peak


# --- refusals

Refused = tuple[str, dict[str, Any], str]
REFUSED: list[Refused] = [
    ("flash", {"causal": True, "window": 3}, "hides nothing but a causal triangle"),
    ("sdpa", {"softcap": 2.0}, "no soft cap"),
    ("cudnn", {}, "runs on cuda only"),
    ("flash_attention_2", {}, "use flash or blockwise"),
]


@pytest.mark.parametrize("kernel, case, reason", REFUSED)
def test_a_kernel_that_cannot_is_refused(kernel: str, case: dict[str, Any], reason: str) -> None:
    with pytest.raises(KernelError, match=reason):
        attention(*tensors(torch.float32)[:3], kernel=kernel, **case)


def test_a_head_beyond_the_kernel() -> None:
    kernel = next(kernel for kernel in KERNELS if kernel.name == "cudnn")
    call = AttentionNeeds("cuda", "bf16", head_size=192, value_size=192)
    assert kernel_supports(kernel, call).reason == "a head of 192 is more than its largest of 128"


@pytest.mark.parametrize("dtype, size, takes", [("bf16", 24, True), ("bf16", 20, False), ("fp32", 20, True)])
def test_a_kernel_that_reads_16_bytes_at_once_takes_heads_of_a_multiple(dtype: str, size: int, takes: bool) -> None:
    kernel = next(kernel for kernel in KERNELS if kernel.name == "efficient")
    capability = kernel_supports(kernel, AttentionNeeds("cuda", dtype, head_size=size, value_size=size))
    assert capability.ok == takes
    assert takes or capability.reason == "in bf16 it takes heads of a multiple of 8, not of 20"


def test_choices_follow_the_call() -> None:
    choose: Callable[..., str] = lambda **more: next(  # noqa: E731
        kernel.name for kernel in KERNELS if kernel_supports(kernel, AttentionNeeds(**more)).ok
    )
    assert choose() == "flash"
    assert choose(masked=True) == choose(bias="keys") == choose(softcap=True) == choose(dropout=True) == "blockwise"
    assert choose(bias="trained") == "sdpa"
