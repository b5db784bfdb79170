"""Totals of a step's routes."""

from __future__ import annotations

import torch

from shardwise.parallel.routers import ExpertRouters


def test_use_of_experts() -> None:
    routers = ExpertRouters(["first", "second"], 4, 0.0, 0.0, True, torch.device("cpu"), torch.float32)
    routers.routed = torch.tensor([[4, 0, 0, 0], [1, 1, 2, 0]])
    totals = routers.totals(routers.measured().tolist())
    assert totals.load == {"first": 4.0, "second": 2.0}
    assert totals.idle == 0.5 and totals.balancing_loss == 0.0
