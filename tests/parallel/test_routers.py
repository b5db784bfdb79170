"""Totals of a step's routes."""

from __future__ import annotations

import torch

from shardwise.data.batch import Batch
from shardwise.kernels.dropout import DropoutScope
from shardwise.parallel.routers import ExpertRouters, counted_tokens


def test_use_of_experts() -> None:
    routers = ExpertRouters(["first", "second"], 4, 0.0, 0.0, True, torch.device("cpu"), torch.float32)
    routers.routed = torch.tensor([[4, 0, 0, 0], [1, 1, 2, 0]])
    totals = routers.totals(routers.measured().tolist())
    assert totals.load == {"first": 4.0, "second": 2.0}
    assert totals.idle == 0.5 and totals.balancing_loss == 0.0


def test_tokens_of_real_rows_count() -> None:
    """Those of a batch's mask, in the part that a tensor rank has; a mask of other sequences says nothing."""
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]])
    batch = Batch({"input_ids": mask, "attention_mask": mask}, None, torch.arange(3))
    real = torch.tensor([True, True, False])
    scope = DropoutScope(0, 0, batch.rows, counted=real, is_token=batch.is_token)
    device = torch.device("cpu")
    assert counted_tokens(scope, 12, device).view(3, 4).int().tolist() == [[1, 1, 0, 0], [1, 1, 1, 0], [0] * 4]
    scope.positions = (2, 4)
    assert counted_tokens(scope, 6, device).view(3, 2).int().tolist() == [[0, 0], [1, 0], [0, 0]]
    assert counted_tokens(scope, 9, device).view(3, 3).int().tolist() == [[1] * 3, [1] * 3, [0] * 3]
