"""From drawn weights to a restored checkpoint a rank uses its accelerator as it should, and keeps nothing back."""

from __future__ import annotations

import inspect
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from shardwise.checkpoint import staging
from shardwise.job.schema import Job
from shardwise.plan.plan import World, resolve
from shardwise.testing.trace import life
from shardwise.testing.trace.life import RankLife, live
from shardwise.training.setup import study
from tests.fork_server import call
from tests.testing.trace.test_discipline import COVER
from tests.testing.trace.test_trace import settings

QUICK = ("sharded",)
WITH_BUFFERS = ("images for convolutions", "a module of one's own")


def life_of(sections: dict[str, Any]) -> RankLife:
    job = Job.model_validate(settings(64, **sections))
    facts = study(job)
    return live(resolve(job, World(16, "cuda", 8), facts), facts, 0)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in COVER]
)
def test_a_life_has_no_fault(name: str) -> None:
    found = call(life_of, COVER[name])
    assert found.faults == dict.fromkeys(found.faults, ())
    steady = set(list(found.alive.values())[1:])
    if name in WITH_BUFFERS:  # of which copies are written, that go with the checkpoint
        steady -= {found.alive["staging"]}
    assert len(found.alive) == 8 and len(steady) == 1, found.alive


# ---- planted faults, each found in its chapter and at its line


def unpinned_restore(source: Any, part: Any, dtype: torch.dtype, item: Any, target: Tensor) -> None:
    target.copy_(torch.empty(tuple(target.shape), dtype=dtype), non_blocking=True)


def with_unpinned_restore() -> RankLife:
    with mock.patch.object(life, "read_box", unpinned_restore):
        return life_of({})


def unawaited(block: staging.StagingBlock) -> memoryview:
    return memoryview(block.memory.numpy())  # type: ignore[arg-type]


def unsettled(ring: staging.Staging) -> None:
    more = True
    while more:
        more = ring._fill()


def with_unawaited_blocks() -> RankLife:
    with (
        mock.patch.object(staging.StagingBlock, "content", unawaited),
        mock.patch.object(staging.Staging, "settle", unsettled),
    ):
        return life_of({})


@pytest.mark.slow
@pytest.mark.parametrize(
    "plant, chapter, function",
    [(with_unpinned_restore, "restore", unpinned_restore), (with_unawaited_blocks, "staging", unawaited)],
)
def test_a_planted_fault_is_found(plant: Any, chapter: str, function: Any) -> None:
    found = call(plant)
    line = inspect.getsourcelines(function)[1] + 1
    guilty = {name for name, faults in found.faults.items() if faults}
    assert guilty == {chapter}
    assert any(fault.startswith(f"trace/test_life.py:{line} ") for fault in found.faults[chapter])
