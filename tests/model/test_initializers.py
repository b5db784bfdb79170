"""Initializers of modules of one's own: which of them fill others, and what cannot be tried."""

from __future__ import annotations

import pytest
from torch import nn

from shardwise.errors import ModelError
from shardwise.model.initializers import parents_that_initialize


def test_a_module_that_keeps_a_computed_tensor_is_refused() -> None:
    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(2, 2)
            self.kept = [self.first.weight * 2]

    with pytest.raises(ModelError, match="Keeping cannot be copied"):
        parents_that_initialize(Keeping(), [])
