"""Initializers of modules of one's own: which of them fill others, and what cannot be tried."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwise.errors import ModelError
from shardwise.model.construct import construct
from shardwise.model.initializers import parents_that_initialize


def test_a_module_that_keeps_a_computed_tensor_is_refused() -> None:
    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(2, 2)
            self.kept = [self.first.weight * 2]

    with pytest.raises(ModelError, match=r"kept of .*Keeping \(.*:\d+\) keeps a tensor made from parameters"):
        parents_that_initialize(Keeping(), [])


class Truncated(nn.Module):
    """Fills a table when it is made, by a function of torch that leaves tensors on the meta device alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(4, 4))
        nn.init.trunc_normal_(self.table)


class Filling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def reset_parameters(self) -> None:
        nn.init.orthogonal_(self.inner.weight)


def test_a_fill_that_skips_meta_tensors_is_seen() -> None:
    constructed = construct(Truncated, 0)
    assert constructed.needs_values and "table" not in constructed.values
    assert constructed.build()["table"].abs().max() > 0
    assert parents_that_initialize(Filling(), []) == {"": ("inner.weight",)}
