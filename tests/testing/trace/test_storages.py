"""Live bytes over time, and whose they are."""

from __future__ import annotations

import torch
from torch import nn

from shardwise._torch_compat.tracing import FakeTensorMode
from shardwise.testing.trace.storages import ACTIVATIONS, TEMPORARIES, WEIGHTS, Storages


def test_what_outlives_the_forward_that_made_it_is_an_activation() -> None:
    storages = Storages()
    with FakeTensorMode():
        layer = nn.Linear(16, 16, bias=False)
        storages.own(WEIGHTS, layer)
        storages.begin()
        kept, lost = torch.empty(16, 16), torch.empty(16, 32)
        storages.see([kept, lost, kept.t()])
        at_peak = storages.moment
        del lost
        storages.turn(in_backward=True)
        gradient = torch.empty(8, 16)
        storages.see([gradient])
        storages.turn(in_backward=False)
        del gradient
    assert (storages.live, storages.peak) == (2048, 4096)
    assert {owner: size for owner, size in storages.owners().items() if size} == {
        WEIGHTS: 1024, ACTIVATIONS: 1024, TEMPORARIES: 2048,
    }  # fmt: skip
    assert [sum(sizes) for sizes in storages.owners_at([at_peak, storages.moment])] == [4096, 2048]


def test_a_storage_that_changes_its_size_is_noticed() -> None:
    storages = Storages()
    with FakeTensorMode(), storages.watching():
        whole = torch.empty(1024)
        storages.see([whole])
        whole.untyped_storage().resize_(0)
        assert storages.live == 0
        whole.untyped_storage().resize_(4096)
    assert storages.live == 4096 == storages.peak
