"""Equal gradients move slices as the whole: weights, codes and scales bit by bit, sums over ranks but for rounding."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from shardwise.checkpoint.state import snapshot
from shardwise.job.optimizer_records import RECORDS
from shardwise.job.optimizer_section import OptimizerSection
from shardwise.job.schema import Job
from shardwise.model.facts import ModelFacts
from shardwise.planner.formulas.memory import estimate
from shardwise.testing.world import WorldPool
from shardwise.training.optimizer import ShardedOptimizer
from shardwise.training.setup import assemble
from tests.parity.jobs import facts_of
from tests.parity.test_optimizers import LAYOUTS, job_of

SUMS_OVER_RANKS = ("Adafactor",)
BLOCKS = {"AdamW8bit": {"block_size": 48}, "AdamWFp8": {"block_size": 48}}
NAMES = [name for name in RECORDS if name != "Muon"]


class Slice(NamedTuple):
    """A part of a logical tensor that a rank would write."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    values: Tensor


def gradient(name: str, shape: tuple[int, ...], step: int) -> Tensor:
    """Draw the whole gradient of a tensor, the same on every rank."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def trained(job: Job, facts: ModelFacts, names: list[str]) -> dict[str, tuple[list[tuple[str, Slice]], int, float]]:
    """Take two steps with each optimizer; return this rank's slices, measured and planned bytes of state."""
    assembled = assemble(job, torch.device("cpu"), facts, None)
    model, found = assembled.model, {}
    start = {entry.name: entry.local.clone() for entry in model.tensor_map}
    for name in names:
        for entry in model.tensor_map:
            entry.local.copy_(start[entry.name])
        settings = OptimizerSection(name=name, learning_rate=1e-2, options=BLOCKS.get(name, {}))
        optimizer = ShardedOptimizer(model.tensor_map, settings, model=model)
        for step in range(2):
            for entry, local in optimizer.locals:
                whole = gradient(entry.name, entry.shape, step)
                local.grad = torch.zeros_like(local)
                for region in entry.regions:
                    local.grad[region.local] = whole[region.logical]
            optimizer.inner.step()
        chunks = [(c.name, Slice(c.shape, c.offset, c.tensor.clone())) for c in snapshot(model, optimizer).chunks]
        plan = assembled.plan
        plan = type(plan)(**{**vars(plan), "job": job.model_copy(update={"optimizer": settings})})
        found[name] = (chunks, optimizer.state_bytes(), estimate(plan, facts).optimizer)
    return found


def joined(ranks: list[list[tuple[str, Slice]]]) -> dict[str, Tensor]:
    """Put logical tensors together; every element comes from one rank."""
    whole: dict[str, Tensor] = {}
    times: dict[str, Tensor] = {}
    for name, part in (item for rank in ranks for item in rank if not item[0].startswith(("random/", "buffer/"))):
        tensor = whole.setdefault(name, torch.empty(part.shape, dtype=part.values.dtype))
        box = tuple(slice(o, o + size) for o, size in zip(part.offset, part.values.shape, strict=True))
        tensor[box] = part.values
        times.setdefault(name, torch.zeros(part.shape, dtype=torch.int32))[box] += 1
    assert all(bool((count == 1).all()) for count in times.values())
    return whole


def compared(world_pool: WorldPool, corpora: Path, layout: str, layers: int = 2) -> None:
    ranks, parallel = LAYOUTS[layout]
    alone = {key: 1 for key in parallel if key == "expert_parallel_degree"}
    one, several = (job_of(corpora, "Adafactor", degrees, layers) for degrees in (alone, parallel))
    expected = world_pool.run(1, trained, one, facts_of(one), NAMES)[0]
    results = world_pool.run(ranks, trained, several, facts_of(several), NAMES)
    for name in NAMES:
        right, found = joined([expected[name][0]]), joined([result[name][0] for result in results])
        assert right.keys() == found.keys()
        for key, tensor in right.items():
            if name in SUMS_OVER_RANKS:
                torch.testing.assert_close(found[key], tensor, rtol=1e-12, atol=1e-12)
            else:
                assert torch.equal(found[key], tensor), (name, key)
        measured, planned = max(result[name][1] for result in results), results[0][name][2]
        assert measured == pytest.approx(planned, rel=0.05), name


def test_slices_move_as_the_whole(world_pool: WorldPool, corpora: Path) -> None:
    compared(world_pool, corpora, "tensor 2, shard 2", layers=1)


@pytest.mark.slow
@pytest.mark.parametrize("layout", list(LAYOUTS)[1:])
def test_slices_move_as_the_whole_on(world_pool: WorldPool, corpora: Path, layout: str) -> None:
    compared(world_pool, corpora, layout)
