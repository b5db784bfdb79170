"""Sums of gradients over ranks of which not all have used what they hold."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.parallel.model import ParallelModel
from shardwise.testing.world import WorldPool


class Entries(dict[str, Any]):
    """A tensor map of whole parameters."""

    def gradients(self, names: list[str]) -> list[Any]:
        return [self[name].parameter.grad for name in names if self[name].parameter.grad is not None]


def summed_gradients(uses: dict[str, list[int]]) -> dict[str, list[float] | None]:
    """Return this rank's gradients of three elements each, of parameters that the ranks in `uses` have used."""
    rank = dist.get_rank()
    parameters = {name: nn.Parameter(torch.zeros(3)) for name in uses}
    parameters["frozen"] = nn.Parameter(torch.zeros(3), requires_grad=False)
    for name, ranks in uses.items():
        if rank in ranks:
            parameters[name].grad = torch.full((3,), rank + 1.0)
    entries = Entries({name: SimpleNamespace(parameter=parameter) for name, parameter in parameters.items()})
    own: Any = SimpleNamespace(tensor_map=entries, device=torch.device("cpu"))
    ParallelModel._sum_used(own, list(parameters), dist.group.WORLD, "tied gradients")
    grads = {name: parameter.grad for name, parameter in parameters.items()}
    return {name: None if grad is None else grad.tolist() for name, grad in grads.items()}


def test_what_one_rank_has_used_gets_its_gradient_on_all(world_pool: WorldPool) -> None:
    """A gradient that is there on one rank alone would else meet another's."""
    found = world_pool.run(2, summed_gradients, {"first": [0], "second": [1], "both": [0, 1], "neither": []})
    expected = {"first": [1.0] * 3, "second": [2.0] * 3, "both": [3.0] * 3, "neither": None, "frozen": None}
    assert found == [expected, expected]
