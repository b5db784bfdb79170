"""Parameters that a later microbatch writes are found before the backward that would read them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwise.errors import ModelError
from shardwise.parallel.stage_writes import StageWrites


def test_a_write_between_forward_and_backward_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    writes = StageWrites(model)
    writes.after_forward(0)
    model[1].weight.data.copy_(model[1].weight.data.flip(0))  # the same values in other places
    writes.after_forward(1)
    writes.before_backward(1)
    with pytest.raises(ModelError, match=r"writes the parameter 1\.weight by `\.data`.*microbatch 0"):
        writes.before_backward(0)


def test_a_write_that_changes_nothing_and_one_after_the_backward_are_let_pass() -> None:
    model = nn.Linear(2, 2)
    writes = StageWrites(model)
    for microbatch in range(2):
        writes.after_forward(microbatch)
        model.weight.data.clamp_(-9, 9)
        writes.before_backward(microbatch)
        model.weight.data.mul_(0.5)
    assert not torch.isnan(model.weight).any()
