"""Operators of 16 bits that are summed in fp32 on a CPU: one rounding from the exact result, whatever they add up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import shardwise.smp as smp
import shardwise.smp.v2 as tsm
from shardwise.commands import train as entry
from shardwise.commands import workers
from shardwise.job.schema import Job
from shardwise.kernels import sums
from shardwise.kernels.sums import fp32_sums
from shardwise.testing.world import WorldPool
from tests.parity.jobs import make_job

HALVES = [torch.bfloat16, torch.float16]
CAUSAL = torch.zeros(5, 5).masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), -1e4)
Calls = dict[str, Callable[[Tensor, Tensor], Tensor]]

CALLS: Calls = {  # of x [2, 5, 24] and w [7, 24]
    "linear": lambda x, w: F.linear(x, w),
    "linear and bias": lambda x, w: F.linear(x, w, w[:, 0]),
    "of matrices": lambda x, w: x[0] @ w.T,
    "of batches": lambda x, w: x @ x.transpose(1, 2),
    "added to": lambda x, w: torch.baddbmm(x[:, :, :5], x, x.transpose(1, 2), beta=0.5, alpha=2.0),
    "einsum": lambda x, w: torch.einsum("bse,oe->bos", x, w),
    "causal attention": lambda x, w: F.scaled_dot_product_attention(*3 * [heads(x)], is_causal=True),
    "masked attention": lambda x, w: F.scaled_dot_product_attention(*3 * [heads(x)], attn_mask=CAUSAL.to(x)),
}
INTO: Calls = {
    "mm": lambda x, w: torch.mm(x[0], w.T, out=x.new_empty(5, 7)),
    "addmm": lambda x, w: torch.addmm(w[:, 0], x[0], w.T, out=x.new_empty(5, 7)),
    "bmm": lambda x, w: torch.bmm(x, x.transpose(1, 2), out=x.new_empty(2, 5, 5)),
    "addmm_": lambda x, w: x.new_full((5, 7), 0.5).addmm_(x[0], w.T),
    "baddbmm": lambda x, w: torch.baddbmm(x[:, :, :5], x, x.transpose(1, 2), out=x.new_empty(2, 5, 5)),
    "baddbmm_": lambda x, w: x.new_full((2, 5, 5), 0.5).baddbmm_(x, x.transpose(1, 2)),
    "addmm_ to nothing": lambda x, w: x.new_full((5, 7), float("nan")).addmm_(x[0], w.T, beta=0),
    "experts": lambda x, w: grouped(x, w),
}

IDS = torch.arange(2048).reshape(4, 512) % 7
MANY: dict[str, Callable[..., Tensor]] = {  # of x [2048, 24] and w [7, 24], each of whose rows gets 293 gradients
    "layer norm": lambda x, w: F.layer_norm(x, (24,), w[0], w[1]),
    "layer norm without a bias": lambda x, w: F.layer_norm(x, (24,), w[0]),
    "layer norm of no weight": lambda x, w: F.layer_norm(x, (24,)),
    "layer norm of three": lambda x, w: F.layer_norm(x.unflatten(0, (8, 256)), (24,), w[0], w[1]).flatten(0, 1),
    "embedding": lambda x, w: x + F.embedding(IDS, w).flatten(0, 1),
    "embedding with padding": lambda x, w: x + F.embedding(IDS, w, padding_idx=3).flatten(0, 1),
    "indexed": lambda x, w: x + w[IDS.flatten()],
    "indexed twice": lambda x, w: x * w[IDS.flatten(), IDS.flatten()][:, None],
    "masked": lambda x, w: F.pad(x[IDS.flatten() < 3], (0, 0, 0, 1169)) * w[0],
}


@pytest.fixture(autouse=True)
def processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """One without instructions for either dtype."""
    monkeypatch.setattr(sums, "multiplies", lambda dtype: False)


def heads(x: Tensor) -> Tensor:
    return x.unflatten(2, (3, 8)).transpose(1, 2)


def grouped(x: Tensor, w: Tensor) -> Tensor:
    """Rows of two experts, by torch's own product of groups where it takes the dtype."""
    experts = torch.stack([w.T, 2 * w.T])
    if x.dtype == torch.float64:
        return torch.cat([x[0, :2] @ experts[0], x[0, 2:] @ experts[1]])
    both = F.pad(experts, (0, 1))[..., :8].contiguous()  # rows of 16 bytes
    ends = torch.tensor([2, 5], dtype=torch.int32)
    return F.grouped_mm(x[0], both, offs=ends)[:, :7]


def factors(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(3)
    x, w = torch.randn(2, 5, 24, generator=draw), torch.randn(7, 24, generator=draw)
    return x.to(dtype), w.to(dtype)


def kernels() -> dict[str, str]:
    """Whose operators this process has."""
    names = (*sums.PRODUCTS, *sums.INTO, *sums.ATTENTION, sums.NORM, sums.EMBEDDING, sums.INDEX)
    return {name: repr(torch.library.get_kernel(f"aten::{name}", "CPU")) for name in names}


def off(found: Tensor, exact: Tensor, dtype: torch.dtype) -> float:
    """The largest error in roundings of the largest element."""
    return float(
        (found.detach().double() - exact.detach()).abs().max() / exact.detach().abs().max() / torch.finfo(dtype).eps
    )


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", CALLS)
def test_products_and_their_gradients(name: str, dtype: torch.dtype) -> None:
    low = [each.requires_grad_() for each in factors(dtype)]
    exact = [each.detach().double().requires_grad_() for each in low]
    with fp32_sums("cpu"):
        found = CALLS[name](*low)
        found.backward(torch.ones_like(found))
    wanted = CALLS[name](*exact)
    wanted.backward(torch.ones_like(wanted))
    assert found.dtype == dtype and off(found, wanted, dtype) <= 1
    for mine, other in zip(low, exact):
        assert (mine.grad is None) == (other.grad is None)
        assert mine.grad is None or other.grad is None or off(mine.grad, other.grad, dtype) <= 4


@pytest.mark.parametrize("weights", ["its own", "fp32"])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", MANY)
def test_gradients_of_many_rows(name: str, dtype: torch.dtype, weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "multiplies", lambda dtype: True)  # the sums are every processor's
    draw = torch.Generator().manual_seed(5)
    x, w = torch.randn(2048, 24, generator=draw).to(dtype), torch.randn(7, 24, generator=draw).to(dtype)
    low = [x.requires_grad_(), (w.float() if weights == "fp32" else w).requires_grad_()]
    exact = [each.detach().double().requires_grad_() for each in low]
    gradient = (0.1 + torch.randn(2048, 24, generator=draw)).to(dtype)
    with fp32_sums("cpu"):
        MANY[name](*low).backward(gradient)
    MANY[name](*exact).backward(gradient.double())
    for mine, other in zip(low, exact):
        assert (mine.grad is None) == (other.grad is None)
        if mine.grad is not None and other.grad is not None:
            assert mine.grad.dtype == mine.dtype and off(mine.grad, other.grad, dtype) <= 2


def test_what_adds_nothing_up_is_torchs_own() -> None:
    table, ids = factors(torch.bfloat16)[1], torch.tensor([1, 1, 4, 4, 4])
    rows = factors(torch.bfloat16)[0][0]
    put = table.clone().index_put_((ids,), rows)
    frequent = [torch.ops.aten.embedding_dense_backward(rows, ids, 7, -1, True)]
    with fp32_sums("cpu"):
        assert torch.equal(table.clone().index_put_((ids,), rows), put)
        frequent.append(torch.ops.aten.embedding_dense_backward(rows, ids, 7, -1, True))
    assert torch.equal(*frequent)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", INTO)
def test_products_into_a_tensor(name: str, dtype: torch.dtype) -> None:
    if name == "experts" and dtype == torch.float16:
        pytest.skip("torch's product of groups takes bf16 alone")
    low = factors(dtype)
    with fp32_sums("cpu"):
        found = INTO[name](*low)
    assert found.dtype == dtype and off(found, INTO[name](*(each.double() for each in low)), dtype) <= 1


def test_everything_else_and_everything_after_is_torchs_own() -> None:
    own = kernels()
    before = [call(*factors(dtype)) for dtype in (*HALVES, torch.float32) for call in CALLS.values()]
    with fp32_sums("cpu", "bf16"):
        with fp32_sums("cpu"):
            pass  # an inner one neither adds nor ends anything
        assert all(mine != own[name] for name, mine in kernels().items())
        inside = [call(*factors(dtype)) for dtype in [*HALVES[1:], torch.float32] for call in CALLS.values()]
        wide = factors(torch.bfloat16)[0] @ factors(torch.bfloat16)[0].transpose(1, 2)
    assert all(torch.equal(a, b) for a, b in zip(inside, before[len(CALLS) :], strict=True))
    exact = factors(torch.bfloat16)[0].double() @ factors(torch.bfloat16)[0].double().transpose(1, 2)
    assert off(wide, exact, torch.bfloat16) <= 1
    after = [call(*factors(dtype)) for dtype in (*HALVES, torch.float32) for call in CALLS.values()]
    assert kernels() == own
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize("given", [("cuda", None), ("cpu", "fp32"), ("cpu", "auto"), ("cpu", "fp64")])
def test_nothing_is_replaced_where_nothing_needs_it(given: tuple[str, str | None]) -> None:
    with fp32_sums(*given):
        assert not sums._summed


def test_a_processor_with_instructions_keeps_torchs_products(monkeypatch: pytest.MonkeyPatch) -> None:
    own = kernels()
    monkeypatch.setattr(sums, "multiplies", lambda dtype: dtype == torch.bfloat16)
    with fp32_sums("cpu", "bf16"):
        changed = {name for name, mine in kernels().items() if mine != own[name]}
        assert changed == {sums.NORM, sums.EMBEDDING, sums.INDEX}
    half = factors(torch.float16)[0]
    bf16 = factors(torch.bfloat16)[0]
    before = bf16 @ bf16.transpose(1, 2)
    with fp32_sums("cpu"):
        assert set(kernels().items()).isdisjoint(own.items())
        assert torch.equal(bf16 @ bf16.transpose(1, 2), before)
        assert off(half @ half.transpose(1, 2), half.double() @ half.double().transpose(1, 2), torch.float16) <= 1


def of_jobs(job: Job) -> list[list[torch.dtype]]:
    """What is summed in fp32 while a job trains and while it is verified."""
    with mock.patch.object(entry, "train_rank", lambda *_: list(sums._summed)):
        trained: Any = entry._worker(job, "cpu", "gloo")
    return [trained, workers._worker(job, "cpu", "gloo", lambda *_: list(sums._summed), ())]


def of_scripts() -> list[list[torch.dtype]]:
    """The same after `init` of SMP's two versions, and after each of their resets."""
    found = []
    for state, begin in ((smp.state, lambda: smp.init({})), (tsm.state, tsm.init)):
        begin()
        found.append(list(sums._summed))
        state.reset()
        found.append(list(sums._summed))
    return found


def test_jobs_and_scripts_sum_so(world_pool: WorldPool, corpora: Path) -> None:
    for compute, dtypes in {"bf16": HALVES[:1], "fp16": HALVES[1:], "fp32": []}.items():
        job = make_job(corpora, precision={"compute": compute})
        assert world_pool.run(1, of_jobs, job) == [[dtypes, dtypes]]
    assert world_pool.run(1, of_scripts) == [[HALVES, [], HALVES, []]]
