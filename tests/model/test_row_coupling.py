"""A forward that decides by values for rows together is told from one in which each row decides for itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from shardwise.errors import LegalityError
from shardwise.job.schema import Job
from shardwise.model.row_coupling import ROWS, couples_rows
from shardwise.plan.plan import World, resolve
from shardwise.training.setup import study
from tests.habits.building import POSITIONS, WIDTH
from tests.habits.trial import make_job

CPU2 = World(2, "cpu", 2)


class TwoWays(nn.Module):
    """Two layers, of which rows take one or the other."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)


class FirstRowDecides(TwoWays):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if x[0, 0, 0] > 0 else self.b(x)


class MeanDecides(TwoWays):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if x.mean() > 0 else self.b(x)


class EachRowDecides(TwoWays):
    """Routed experts of one's own, of which an idle one is left out."""

    def forward(self, x: Tensor) -> Tensor:
        is_first = x[:, 0, 0] > 0
        output = torch.zeros_like(x)
        for expert, rows in ((self.a, is_first.nonzero()[:, 0]), (self.b, (~is_first).nonzero()[:, 0])):
            if len(rows):
                output = output.index_add(0, rows, expert(x[rows]))
        return output


class MeanLoss(FirstRowDecides):
    """Nothing that is returned belongs to a row."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


class Unset(FirstRowDecides):
    """Weights that a trainer would fill."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.constant_(self.a.weight, torch.nan)
        nn.init.constant_(self.b.weight, torch.nan)


class Raising(TwoWays):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyError("x")


@pytest.mark.parametrize(
    ("module", "is_coupled"),
    [
        (FirstRowDecides, True),
        (MeanDecides, True),
        (EachRowDecides, False),
        (MeanLoss, False),
        (Unset, False),
        (Raising, False),
    ],
)
def test_which_forwards_couple_rows(module: type[nn.Module], is_coupled: bool) -> None:
    x = torch.randn(ROWS, POSITIONS, WIDTH, generator=torch.Generator().manual_seed(1))
    before = torch.get_rng_state()
    assert couples_rows(module, 0, {"x": x}) is is_coupled
    assert torch.equal(torch.get_rng_state(), before)


def job_of(corpora: Path, module: str, microbatch: int | None) -> Job:
    factory = {"factory": f"tests.model.test_row_coupling:{module}"}
    return make_job(str(corpora), "Stack", {"model": factory, "training": {"microbatch_size": microbatch}})


def test_a_layout_may_not_choose_which_rows_are_together(corpora: Path) -> None:
    """One process has them all together; a microbatch that the job gives is the same on every layout."""
    job = job_of(corpora, "FirstRowDecides", None)
    facts = study(job)
    resolve(job, World(1, "cpu", 1), facts)
    with pytest.raises(LegalityError, match=r"FirstRowDecides \(.*coupling\.py:\d+\) decides by values of all rows"):
        resolve(job, CPU2, facts)
    resolve(job_of(corpora, "FirstRowDecides", 2), CPU2, facts)
    routed = job_of(corpora, "EachRowDecides", None)
    resolve(routed, CPU2, study(routed))
