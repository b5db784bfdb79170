"""fp32 products by oneDNN: the same numbers, wherever they are asked for, and torch's own again afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from shardwise.commands import train as entry
from shardwise.commands import workers
from shardwise.job.schema import Job
from shardwise.kernels import products
from shardwise.kernels.products import quick_products
from shardwise.launch import job_group
from shardwise.testing.world import WorldPool
from tests.parity.jobs import make_job

ROWS, INNER, COLUMNS = 320, 192, 224  # half of INNER is large enough still
ASKED = products.prefers_onednn
OPERATORS = ("mm", "mm.out", "addmm", "addmm.out")

pytestmark = pytest.mark.skipif(products.onednn_linear is None, reason="a torch without oneDNN")


@pytest.fixture(autouse=True)
def preferred() -> Iterator[None]:
    """As on a processor for which it is quicker, whatever this one is."""
    with mock.patch.object(products, "prefers_onednn", lambda: True):
        yield


def kernels() -> dict[str, str]:
    """Whose operators this process has."""
    return {name: repr(torch.library.get_kernel(f"aten::{name}", "CPU")) for name in OPERATORS}


def matrices() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((ROWS, INNER), (INNER, COLUMNS), (COLUMNS,))
    left, right, bias = (torch.randn(shape, generator=generator) for shape in shapes)
    return left, right, bias


def bound(left: Tensor, right: Tensor) -> Tensor:
    """What a sum in fp32 may be off by, in any order."""
    return INNER * torch.finfo(torch.float32).eps * (left.double().abs() @ right.double().abs())


@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True), (True, True)])
def test_products_are_right_however_the_factors_lie(turned: tuple[bool, bool]) -> None:
    left, right, bias = matrices()
    left, right = (
        each.t().contiguous().t() if turn else each for each, turn in zip((left, right), turned, strict=True)
    )
    exact = left.double() @ right.double()
    into, biased_into = torch.empty(ROWS, COLUMNS), torch.empty(COLUMNS, ROWS).t()
    with quick_products("cpu", "fp32"):
        found, biased = left @ right, torch.addmm(bias, left, right)
        again = left @ right
        assert torch.mm(left, right, out=into) is into
        torch.addmm(bias, left, right, out=biased_into)
    expected = products.onednn_linear(left, right.t(), None, "none", [], "")
    assert torch.equal(found, expected) and torch.equal(found, again)
    assert torch.equal(into, expected) and torch.equal(biased_into, biased)
    assert ((found.double() - exact).abs() <= bound(left, right)).all()
    assert ((biased.double() - exact - bias.double()).abs() <= 2 * bound(left, right)).all()


def test_gradients_of_a_linear_layer() -> None:
    left, right, bias = matrices()
    given = [left.requires_grad_(), right.t().contiguous().requires_grad_(), bias.requires_grad_()]
    weights = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(4))

    def gradients(*given: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad((F.linear(*given) * weights.to(given[0])).sum(), given)

    exact = gradients(*(each.detach().double().requires_grad_() for each in given))
    with quick_products("cpu", "auto"):
        found = gradients(*given)
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-4)


CALLS: dict[str, Callable[..., Tensor]] = {  # of [ROWS, INNER], [INNER, COLUMNS] and [COLUMNS]
    "small": lambda left, right, bias: left[:8] @ right,
    "another dtype": lambda left, right, bias: left.double() @ right.double(),
    "scaled": lambda left, right, bias: torch.addmm(bias, left, right, alpha=0.5),
    "a bias for each element": lambda left, right, bias: torch.addmm(bias.expand(ROWS, -1), left, right),
    "with gaps": lambda left, right, bias: left[:, ::2] @ right[::2],
    "of nothing": lambda left, right, bias: left[:, :0] @ right[:0],
    "into an empty tensor": lambda left, right, bias: torch.mm(left, right, out=torch.empty(0)),
}


@pytest.mark.parametrize("call", CALLS)
def test_everything_else_stays_torchs(call: str) -> None:
    before = CALLS[call](*matrices())
    with quick_products("cpu", "fp32"):
        assert torch.equal(CALLS[call](*matrices()), before)


@pytest.mark.parametrize("shape", [((3, 4), (5, 6)), ((300, 200), (201, 300))])
def test_a_wrong_shape_is_torchs_error(shape: tuple[tuple[int, int], tuple[int, int]]) -> None:
    with quick_products("cpu", "fp32"), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        torch.ones(shape[0]) @ torch.ones(shape[1])


def test_wrong_operands_are_torchs_error() -> None:
    left, right, bias = matrices()
    with quick_products("cpu", "fp32"):
        with pytest.raises(RuntimeError, match="must be a matrix"):
            torch.mm(bias, right)
        with pytest.raises(RuntimeError, match="to have dtype float"):
            torch.mm(left, right, out=torch.empty(ROWS, COLUMNS, dtype=torch.float64))


def test_torchs_own_come_back() -> None:
    own = kernels()
    with quick_products("cpu", "fp32"):
        assert set(kernels().items()).isdisjoint(own.items())
    assert kernels() == own


@pytest.mark.parametrize("given", [("cuda", "fp32"), ("cpu", "bf16"), ("cpu", "fp16"), ("cpu", "fp64")])
def test_nothing_is_replaced_in_other_jobs(given: tuple[str, str]) -> None:
    own = kernels()
    with quick_products(*given):
        assert kernels() == own


@pytest.mark.parametrize(
    ("processor", "capability", "quicker"),
    [
        ("AuthenticAMD", "AVX512", True),
        ("AuthenticAMD", "AVX2", False),
        ("GenuineIntel", "AVX512", False),
        ("", "AVX512", False),
    ],
)
def test_for_which_processors_it_is_quicker(
    processor: str, capability: str, quicker: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "_processor", lambda: f"vendor_id : {processor}")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert ASKED.__wrapped__() is (quicker and torch.backends.mkl.is_available())


def of_jobs(job: Job) -> list[bool]:
    """Whether products are by oneDNN while a job trains and while it is verified, whatever adds in 16 bits here."""
    own = kernels()
    with (
        mock.patch.object(job_group, "fp32_sums", lambda *_: nullcontext()),
        mock.patch.object(products, "prefers_onednn", lambda: True),
        mock.patch.object(entry, "train_rank", lambda *_: kernels() != own),
    ):
        trained = entry._worker(job, "cpu", "gloo")
        return [bool(trained), workers._worker(job, "cpu", "gloo", lambda *_: kernels() != own, ())]


def test_jobs_multiply_so(world_pool: WorldPool, corpora: Path) -> None:
    for compute, quick in {"fp32": True, "bf16": False, "fp64": False}.items():
        assert world_pool.run(1, of_jobs, make_job(corpora, precision={"compute": compute})) == [[quick, quick]]
