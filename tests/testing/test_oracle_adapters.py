"""The reference's own adapters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shardwise.errors import ModelError
from shardwise.job.schema import AdapterSection
from shardwise.testing.oracle_adapters import adapt


class ReadsOne(nn.Module):
    """A block that calls one of its layers and reads the weight of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.read = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.called(x) @ self.read.weight
        return result


def test_only_a_layer_that_is_never_called_may_lack_an_adapter() -> None:
    settings = AdapterSection(kind="lora", rank=2)
    read = adapt(nn.Sequential(ReadsOne()), settings, {"0.called.lora_A.weight"})
    assert {name for name, _ in read.named_parameters() if "lora" in name} == {
        f"0.called.lora_{which}.weight" for which in "AB"
    }
    assert read(torch.ones(2, 4)).shape == (2, 4)
    called = adapt(nn.Sequential(ReadsOne()), settings, {"0.read.lora_A.weight"})
    with pytest.raises(ModelError, match=r"0.called is called by the model.*the run has no adapter there"):
        called(torch.ones(2, 4))
