"""Rows that change each other's numbers are found, in a forward, a loss and gradients; rows by themselves are not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.errors import LegalityError
from shardwise.job.schema import Job
from shardwise.model import row_coupling
from shardwise.model.row_coupling import ROWS, RowCoupling, TrialRows, find_coupling
from shardwise.plan.plan import World, resolve
from shardwise.training.setup import study
from tests.habits.building import POSITIONS, WIDTH, squared_error
from tests.habits.trial import make_job

CPU1, CPU2 = World(1, "cpu", 1), World(2, "cpu", 2)


class Mixing(nn.Module):
    """Two layers with something between them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.b(self.mix(self.a(x))).mean(1)
        return result

    def mix(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


class FirstRowDecides(Mixing):
    def mix(self, x: Tensor) -> Tensor:
        return x if x[0, 0, 0] > 0 else self.a(x)


class HiddenDecision(Mixing):
    def mix(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            is_large = bool(x.mean() > 0)
        return 2 * x if is_large else x


class EachRowDecides(Mixing):
    """Routed experts of one's own, of which an idle one is left out."""

    def mix(self, x: Tensor) -> Tensor:
        is_first = x[:, 0, 0] > 0
        output = torch.zeros_like(x)
        for expert, rows in ((self.a, is_first.nonzero()[:, 0]), (self.b, (~is_first).nonzero()[:, 0])):
            if len(rows):
                output = output.index_add(0, rows, expert(x[rows]))
        return output


class MeanOff(Mixing):
    def mix(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class ByLargest(Mixing):
    def mix(self, x: Tensor) -> Tensor:
        return x / x.abs().max()


class Summing(Mixing):
    def mix(self, x: Tensor) -> Tensor:
        return x.cumsum(0)


class Chosen(Mixing):
    """A decision that asks no value of a tensor."""

    def mix(self, x: Tensor) -> Tensor:
        return torch.where(x.mean() > 0, x, -x)


class Permuted(Mixing):
    def mix(self, x: Tensor) -> Tensor:
        return 0.7 * x + 0.3 * x[torch.randperm(len(x))]


class OverBatch(Mixing):
    """Attention over the wrong dim: `batch_first` is forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2)

    def mix(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.attention(x, x, x)[0]
        return mixed


class OfMicrobatch(Mixing):
    """A batch norm without running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(POSITIONS, track_running_stats=False)

    def mix(self, x: Tensor) -> Tensor:
        normed: Tensor = self.norm(x)
        return normed


class InTraining(Mixing):
    """A deviation that a single row has not."""

    def mix(self, x: Tensor) -> Tensor:
        return x / (x.std(0) + 1) if self.training else x


class GradientsTogether(Mixing):
    """Values of rows by themselves, gradients of rows together."""

    def mix(self, x: Tensor) -> Tensor:
        x = torch.tanh(x)
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient / (1 + gradient.norm()))
        return x


class ZeroAtStart(MeanOff):
    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.b.weight)


class Statistics(Mixing):
    """A batch norm, whose rule is `model.running_statistics`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(POSITIONS)

    def mix(self, x: Tensor) -> Tensor:
        normed: Tensor = self.norm(x)
        return normed


class Dropping(Mixing):
    def mix(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, self.training)


class Noisy(Mixing):
    def mix(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x) * x.exp()


class Rounding(Mixing):
    def mix(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class MeanLoss(Mixing):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        return (super().forward(x) - labels).square().mean() + 0.01 * self.a.weight.square().sum()


class BalancedMeanLoss(Mixing):
    """A loss that balances what rows use, as those of routers do."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        output = super().forward(x)
        return (output - labels).square().mean() + 0.01 * output.softmax(-1).mean(0).square().sum()


class SummedLoss(Mixing):
    """Not the mean that it should be."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        return (super().forward(x) - labels).square().sum()


class Raising(Mixing):
    def mix(self, x: Tensor) -> Tensor:
        raise KeyError("x")


def contrast(output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    """Return a loss between the rows of a microbatch."""
    scores = F.normalize(output) @ F.normalize(batch.labels.to(output.dtype)).t()
    losses = F.cross_entropy(scores, torch.arange(len(output)), reduction="none")
    return (losses * batch.counted).sum(), batch.counted.sum()


def trial_rows() -> TrialRows:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(ROWS, POSITIONS, WIDTH, generator=generator), torch.randn(ROWS, WIDTH, generator=generator)

    def summed(call: Any, rows: Sequence[int]) -> Tensor:
        dtype = torch.get_default_dtype()
        return (call(x=x[list(rows)].to(dtype)) - y[list(rows)]).square().sum()

    return TrialRows(ROWS, {"x": x[:1]}, summed)


APART, COUPLED = RowCoupling(), RowCoupling(is_coupled=True)
QUICK: dict[type[Mixing], RowCoupling] = {
    HiddenDecision: COUPLED,
    EachRowDecides: APART,
    MeanOff: COUPLED,
    GradientsTogether: COUPLED,
    Dropping: APART,
}
SLOW: dict[type[Mixing], RowCoupling] = {
    Mixing: APART,
    FirstRowDecides: COUPLED,
    ByLargest: COUPLED,
    Summing: COUPLED,
    Chosen: COUPLED,
    OverBatch: COUPLED,
    OfMicrobatch: COUPLED,
    InTraining: COUPLED,
    ZeroAtStart: COUPLED,
    Rounding: APART,
    Permuted: RowCoupling(is_coupled=True, draws_numbers=True),
    Statistics: RowCoupling(keeps_statistics=True),
    Noisy: RowCoupling(draws_numbers=True),
}


@pytest.mark.parametrize("expected", [QUICK, pytest.param(SLOW, marks=pytest.mark.slow)], ids=["quick", "slow"])
def test_which_forwards_couple_rows(expected: dict[type[Mixing], RowCoupling]) -> None:
    rows, decide = trial_rows(), (FirstRowDecides, HiddenDecision, EachRowDecides)
    modules = {kind: kind() for kind in expected}
    before = torch.get_rng_state()
    assert {kind: find_coupling(module, rows, kind in decide) for kind, module in modules.items()} == expected
    assert torch.equal(torch.get_rng_state(), before) and torch.get_default_dtype() is torch.float32


def test_what_cannot_be_tried_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = trial_rows()
    assert "it raises KeyError: 'x'" in find_coupling(Raising(), rows).untried
    monkeypatch.setattr(row_coupling, "MOST_OPERATIONS", 5e3)
    assert find_coupling(MeanOff(), rows).is_coupled, "two rows are enough where no decision may hang on values"
    assert find_coupling(MeanOff(), rows, reads_values=True).untried.startswith("a forward of one row takes 6e+02")
    with torch.device("meta"):
        large = nn.Linear(2**14, 2**14)
    assert find_coupling(large, rows).untried == "it has 268,451,840 parameters"


def job_of(corpora: Path, module: str, microbatch: int | None = None, loss: str | None = None) -> Job:
    here = "tests.model.test_row_coupling"
    model: dict[str, Any] = {"factory": f"{here}:{module}", "loss": loss and f"{here}:{loss}"}
    return make_job(str(corpora), "Stack", {"model": model, "training": {"microbatch_size": microbatch}})


def test_a_layout_may_not_choose_which_rows_are_together(corpora: Path) -> None:
    """One process has them all together; a microbatch that the job gives is the same on every layout."""
    job = job_of(corpora, "FirstRowDecides", loss=squared_error.__name__)
    facts = study(job)
    resolve(job, CPU1, facts)
    with pytest.raises(LegalityError, match=r"FirstRowDecides \(.*coupling\.py:\d+\) or its loss gives other numbers"):
        resolve(job, CPU2, facts)
    resolve(job_of(corpora, "FirstRowDecides", 2, squared_error.__name__), CPU2, facts)


def test_losses_are_tried_too(corpora: Path) -> None:
    trials = [("MeanLoss", None), ("BalancedMeanLoss", None), ("SummedLoss", None), ("Mixing", contrast.__name__)]
    found = [study(job_of(corpora, module, loss=loss)).couples_rows for module, loss in trials]
    assert found == [False, True, True, True]


def test_a_decision_that_cannot_be_tried_needs_a_microbatch(corpora: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_coupling, "MOST_OPERATIONS", 10.0)
    job = job_of(corpora, "EachRowDecides", loss=squared_error.__name__)
    with pytest.raises(LegalityError, match=r"could not be tried \(a forward of one row takes"):
        resolve(job, CPU2, study(job))
    job = job_of(corpora, "Mixing", loss=squared_error.__name__)
    assert any("was not tried: a forward of one row takes" in note for note in resolve(job, CPU2, study(job)).notes)


def test_what_depends_on_the_layout_is_said(corpora: Path) -> None:
    notes = []
    for module in ("Statistics", "Dropping"):
        job = job_of(corpora, module, loss=squared_error.__name__)
        notes.append([note for note in resolve(job, CPU2, study(job)).notes if module in note])
    assert [len(each) for each in notes] == [1, 0]
    assert "takes statistics of the rows of a microbatch, which has 4" in notes[0][0]
    job = job_of(corpora, "Noisy", loss=squared_error.__name__)
    with pytest.raises(LegalityError, match=r"draws random numbers for the rows of a microbatch together"):
        resolve(job, CPU2, study(job))
