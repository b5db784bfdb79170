"""The group of one rank: every collective leaves or copies what is there, and a job trains in it as over Gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwise._torch_compat.groups import all_gather_single, functional_collectives, reduce_scatter_single
from shardwise.collectives.alone import AloneGroup
from shardwise.launch.process_group import process_group
from shardwise.testing.world import WorldPool
from tests.fork_server import call
from tests.parity.jobs import make_job
from tests.training.test_step import steps


def outputs() -> list[tuple[str, list[float]]]:
    """Return what each collective makes of 0, 1, 2, 3."""
    found: list[tuple[str, Any]] = []
    with process_group("cpu", "alone"):
        assert isinstance(dist.group.WORLD, AloneGroup) and dist.get_backend() == "alone"
        values = torch.arange(4.0)
        for in_place in (dist.all_reduce, lambda x: dist.broadcast(x, 0), lambda x: dist.reduce(x, 0)):
            in_place(own := values.clone())
            found.append(("in place", own))
        for into in (all_gather_single, reduce_scatter_single, dist.all_to_all_single):
            into(output := torch.empty(4), values)
            found.append((into.__name__, output))
        found += [("list", output) for output in of_lists(values)]
        found.append(("functional", functional_collectives.all_reduce(values, "sum", dist.group.WORLD) + 0))
        dist.all_gather_object(everyone := [None], "one")
        dist.barrier()
        assert everyone == ["one"]
    return [(name, output.tolist()) for name, output in found]


def of_lists(values: Tensor) -> list[Tensor]:
    gathered, exchanged, at_root = ([torch.empty(4)] for _ in range(3))
    dist.all_gather(gathered, values)
    dist.all_to_all(exchanged, [values])
    dist.gather(values, at_root)
    dist.reduce_scatter(reduced := torch.empty(4), [values])
    dist.scatter(scattered := torch.empty(4), [values])
    return [*gathered, *exchanged, *at_root, reduced, scattered]


def trained(job: Any) -> list[tuple[float, float, int]]:
    with process_group("cpu", "alone"):
        return steps(job, 3)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_every_collective_gives_back_what_it_is_given() -> None:
    found = call(outputs)
    assert len(found) == 12
    assert found == [(name, [0.0, 1.0, 2.0, 3.0]) for name, _ in found]


def test_a_job_trains_as_over_gloo(world_pool: WorldPool, corpora: Path) -> None:
    job = make_job(corpora)
    for alone, over_gloo in zip(call(trained, job), world_pool.run(1, steps, job, 3)[0], strict=True):
        assert alone == pytest.approx(over_gloo, rel=1e-12)  # processes may have other numbers of threads
