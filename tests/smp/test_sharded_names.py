"""Whole state dicts of a model in tensor parts: where the parts meet."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.parallel.tensor_map import ParameterSplit
from shardwise.smp.v2 import split_model


def test_parts_in_host_memory_meet_on_the_rank_s_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that has joined its ranks by `init_process_group("nccl")` has no group for tensors of the CPU."""
    model, cut, met = nn.Linear(3, 2), ParameterSplit((4, 3), 0, (4,), 2, 0), list[str]()
    vars(model)[split_model.CUTS] = {"weight": cut}

    def gather_split(part: Tensor, *rest: Any) -> Tensor:
        met.append(part.device.type)
        return torch.ones(cut.shape)

    monkeypatch.setattr(split_model, "gather_split", gather_split)
    groups: Any = {cut.axis: None}
    weights = {"weight": torch.zeros(2, 3)}
    split_model.join_parts(model, weights, "", groups, torch.device("meta"))
    assert met == ["meta"] and weights["weight"].shape == cut.shape and weights["weight"].device.type == "cpu"
