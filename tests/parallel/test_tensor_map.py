"""TensorMap: slices cover each tensor exactly as often as it is replicated, on every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.parallel.layout import Layout
from shardwise.parallel.tensor_map import TensorMap
from shardwise.testing.world import WorldPool
from shardwise.training.setup import set_up
from tests.parity.jobs import make_job, make_module_job, tensor_job

Box = tuple[tuple[int, int], ...]
Seen = tuple[str, tuple[str, ...], tuple[int, ...], list[tuple[Box, Box]], tuple[int, ...], int]


def box(slices: tuple[slice, ...]) -> Box:
    return tuple((part.start, part.stop) for part in slices)


def seen(job: Any) -> list[Seen]:
    run = set_up(job, torch.device("cpu"))
    return [
        (
            entry.name,
            entry.aliases,
            entry.shape,
            [(box(region.logical), box(region.local)) for region in entry.regions],
            tuple(entry.local.shape),
            entry.replication,
        )
        for entry in run.model.tensor_map
    ]


def stored_and_gathered(job: Any) -> bool:
    """Whole tensors put in by slices come out whole."""
    run = set_up(job, torch.device("cpu"))
    equal = True
    for entry in run.model.tensor_map:
        whole = torch.arange(float(torch.Size(entry.shape).numel()), dtype=torch.float64).view(entry.shape)
        entry.store(whole)
        equal &= torch.equal(entry.whole(), whole)
        equal &= all(torch.equal(entry.local[part.local], whole[part.logical]) for part in entry.regions)
        equal &= torch.equal(entry.whole(gradient=True), torch.zeros_like(whole))
    return equal


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "ranks, parallel",
    [
        (1, {}),
        (3, {}),
        pytest.param(8, {}, marks=pytest.mark.slow),
        (4, {"sharded_data_parallel_degree": 2}),
        (4, {"sharded_data_parallel_degree": 1}),
        (4, {"shard_optimizer_state": True}),
        pytest.param(*(6, {"sharded_data_parallel_degree": 3, "placement_strategy": "spread"}), marks=pytest.mark.slow),
        (2, {"tensor_parallel_degree": 2}),
        (4, {"tensor_parallel_degree": 2, "sharded_data_parallel_degree": 2}),
        pytest.param(*(8, {"tensor_parallel_degree": 2, "sharded_data_parallel_degree": 2}), marks=pytest.mark.slow),
        pytest.param(*(6, {"tensor_parallel_degree": 2, "placement_strategy": "spread"}), marks=pytest.mark.slow),
        (4, {"tensor_parallel_degree": 4}),
        pytest.param(8, {"tensor_parallel_degree": 4}, marks=pytest.mark.slow),
    ],
)
def test_every_element_lives_as_often_as_it_is_replicated(
    world_pool: WorldPool,
    corpora: Path,
    ranks: int,
    parallel: dict[str, Any],
) -> None:
    family = "gpt2" if parallel.get("tensor_parallel_degree") == 4 else ""
    jobs = [tensor_job(corpora, "llama", parallel=parallel)]
    jobs.append(
        tensor_job(corpora, family, parallel=parallel) if family else make_job(corpora, layers=1, parallel=parallel)
    )
    if "tensor_parallel_degree" not in parallel:
        jobs.append(make_module_job(corpora, parallel=parallel))
    for job in jobs:
        everyone = world_pool.run(ranks, seen, job)
        for entries in zip(*everyone, strict=True):
            name, aliases, shape, _, _, replication = entries[0]
            assert {(e[0], e[1], e[2], e[5]) for e in entries} == {(name, aliases, shape, replication)}
            count = torch.zeros(shape, dtype=torch.int64)
            for *_, regions, local, _ in entries:
                filled = torch.zeros(local, dtype=torch.int64)
                for logical, place in regions:
                    count[tuple(slice(*part) for part in logical)] += 1
                    filled[tuple(slice(*part) for part in place)] += 1
                assert bool((filled == 1).all())
            assert torch.equal(count, torch.full(shape, replication))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ranks, tensor", [(1, 1), (5, 1), (2, 2), (6, 2)])
def test_store_and_whole_are_inverse(world_pool: WorldPool, corpora: Path, ranks: int, tensor: int) -> None:
    job = make_job(corpora, layers=1, parallel={"tensor_parallel_degree": tensor})
    assert all(world_pool.run(ranks, stored_and_gathered, job))


def test_ties_are_one_entry_under_every_name() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3), "c": nn.Linear(3, 2)})
    model["b"].weight = model["a"].weight
    tensor_map = TensorMap.of([model], Layout({}))
    assert [entry.name for entry in tensor_map] == ["a.weight", "a.bias", "b.bias", "c.weight", "c.bias"]
    assert tensor_map["b.weight"] is tensor_map["a.weight"] and tensor_map["a.weight"].aliases == ("b.weight",)
    with pytest.raises(KeyError):
        tensor_map["d.weight"]


def test_local_shares_storage_with_the_parameter() -> None:
    model = nn.Linear(3, 3)
    entry = TensorMap.of([model], Layout({}))["weight"]
    entry.local.fill_(7.0)
    assert float(model.weight.detach().min()) == 7.0 and entry.local_gradient is None
    model(torch.ones(1, 3)).sum().backward()
    assert entry.local_gradient is not None and torch.equal(entry.local_gradient, torch.ones(3, 3))
