"""Trials of drawn modules: many in one world, each against plain torch, and what each came to.

Ranks write down where they are. When one fails or hangs, the module at which it happened is named, and the others that
were drawn are tried in a new world.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path

import torch.distributed as dist

from shardwise.testing.world import WorldError, WorldPool
from tests.fuzz.recipes import Recipe, job_of
from tests.habits.table import HALF
from tests.habits.trial import Trial, try_module
from tests.studied import each_rank_studies

EXACT = 1e-9  # of parameters and losses in fp64
ROUNDED = 5e-2  # of losses in bf16
SECONDS = 12.0  # for one module, before its ranks are said to hang
START_SECONDS = 120.0


@dataclass(frozen=True)
class Outcome:
    """What a drawn module came to, by rank."""

    recipe: Recipe
    trials: Sequence[Trial] = field(default_factory=list)
    failure: str = ""  # of a rank that raised, died or hung

    @property
    def fault(self) -> str:
        """Say what is wrong, if anything is."""
        if self.failure:
            return self.failure
        refusals = [trial.refusal for trial in self.trials]
        if any(refusals):
            return "" if all(refusals) and not any(trial.steps for trial in self.trials) else "refused late or by some"
        if self.recipe.layout == HALF:
            return "" if all(trial.losses < ROUNDED for trial in self.trials) else "other losses"
        errors = [error for trial in self.trials for error in (trial.losses, trial.parameters)]
        return "" if all(error < EXACT for error in errors) else "other numbers"

    @property
    def refusal(self) -> str:
        return self.trials[0].refusal if self.trials else ""

    @property
    def summary(self) -> str:
        """Say it in a few lines: the last of a traceback."""
        fault = self.fault.splitlines()[-1] if self.fault else "right"
        return "\n".join([f"{self.recipe}: {fault}", *dict.fromkeys(map(str, self.trials))])

    def __str__(self) -> str:
        return "\n".join([f"{self.fault or 'right'}: {self.recipe}", *dict.fromkeys(map(str, self.trials))])


def try_all(
    pool: WorldPool, recipes: Sequence[Recipe], directory: Path, study_together: bool = False
) -> Iterator[Outcome]:
    """Try each recipe in worlds of its size, and yield what it came to."""
    by_size = sorted(recipes, key=lambda recipe: recipe.workers)
    for workers, group in groupby(by_size, key=lambda recipe: recipe.workers):
        pending = list(group)
        while pending:
            outcomes = list(_try_together(pool, workers, pending, directory, study_together))
            yield from outcomes
            pending = pending[len(outcomes) :]


def _try_together(
    pool: WorldPool, workers: int, recipes: Sequence[Recipe], directory: Path, study_together: bool
) -> Iterator[Outcome]:
    """Yield the outcomes as far as the first failure, which is the last of them."""
    with tempfile.TemporaryDirectory(dir=directory) as log:
        failure = ""
        try:
            seconds = START_SECONDS + SECONDS * len(recipes)
            pool.run(workers, _try_on_rank, recipes, str(directory), log, study_together, timeout=seconds)
        except WorldError as error:
            failure = str(error)
        logs = [_read(Path(log) / f"{rank}") for rank in range(workers)]
    done = min(map(len, logs))
    for recipe, *trials in zip(recipes[:done], *logs, strict=False):
        yield Outcome(recipe, trials)
    if failure:
        yield Outcome(recipes[done], failure=failure)


def _read(path: Path) -> list[Trial]:
    return [Trial(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def _try_on_rank(recipes: Sequence[Recipe], directory: str, log: str, study_together: bool) -> None:
    path = Path(log) / f"{dist.get_rank()}"
    for recipe in recipes:
        with nullcontext() if study_together else each_rank_studies():
            trial = try_module(job_of(recipe, directory))
        dist.barrier()  # a rank that refuses alone is caught here
        with path.open("a") as file:
            file.write(json.dumps(asdict(trial)) + "\n")
