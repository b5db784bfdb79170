"""What is mended of a model when it is built."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwise.model.replacements import mend_batch_norms


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(4), nn.Sequential(nn.BatchNorm3d(4))], ids=["2d", "3d"])
def test_batch_norms_of_one_image_have_right_gradients_where_channels_come_last(norm: nn.Module) -> None:
    dims = [4, 4, 2] if isinstance(norm, nn.Sequential) else [4, 4]
    images = torch.randn(1, 4, *dims, dtype=torch.float64, requires_grad=True)
    mend_batch_norms(norm)
    mend_batch_norms(norm)  # a module that is given twice is mended once
    weight = torch.randn(4, 4, dtype=torch.float64)

    def channels_last(values: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(norm.double()(values).view(1, 4, -1).permute(0, 2, 1), weight)

    assert torch.autograd.gradcheck(channels_last, images)
    assert sum(len(module._forward_hooks) for module in norm.modules()) == 1
