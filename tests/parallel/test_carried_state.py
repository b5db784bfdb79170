"""A mixer on one chunk after the other: its numbers, and mixers that compute beside the cache they are given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.errors import ModelError
from shardwise.model.facts import DECODER, CarriedState, GatheredModule
from shardwise.parallel.carried_state import run_in_chunks

ALONE: Any = SimpleNamespace(group=SimpleNamespace(size=lambda: 1, rank=lambda: 0), settle=lambda: None)
MIXER = GatheredModule("mixer", DECODER, (0,), (0,), CarriedState(recurrent=(4,), ahead=(4, 2)))


def summed(rows: Tensor, before: Tensor | None, positions: int) -> Tensor:
    """Sum each row with the two ahead of it, then all rows up to each."""
    padded = torch.nn.functional.pad(rows, (0, 0, max(0, positions + 2 - rows.shape[1]), 0))
    near = padded[:, :-2] + padded[:, 1:-1] + padded[:, 2:]
    return near.cumsum(1) + (0 if before is None else before[:, None])


def mixer(hidden_states: Tensor, cache: Any = None) -> Tensor:
    before = cache.get_recurrent_state(0)
    rows = cache.update_conv_state(hidden_states.mT, 0, conv_kernel_size=3).mT
    output = summed(rows, before, hidden_states.shape[1])
    cache.update_recurrent_state(output[:, -1], 0)
    return output


def deaf(hidden_states: Tensor, cache: Any = None) -> Tensor:
    cache.update_conv_state(hidden_states.mT, 0, conv_kernel_size=3)
    cache.update_recurrent_state(hidden_states[:, -1], 0)
    return hidden_states


def mute(hidden_states: Tensor, cache: Any = None) -> Tensor:
    cache.get_recurrent_state(0)
    return hidden_states


@pytest.mark.parametrize("positions", [2, 6])
def test_chunks_have_the_numbers_of_the_whole(positions: int) -> None:
    hidden = torch.randn(3, positions, 4, dtype=torch.float64, requires_grad=True)
    whole = summed(hidden, None, positions)
    chunks = run_in_chunks(MIXER, ALONE, mixer, (hidden,), {})
    assert torch.allclose(chunks, whole, rtol=1e-12)
    weights = torch.randn_like(whole)
    (of_whole,) = torch.autograd.grad((whole * weights).sum(), hidden)
    (of_chunks,) = torch.autograd.grad((chunks * weights).sum(), hidden)
    assert torch.allclose(of_chunks, of_whole, rtol=1e-12)


@pytest.mark.parametrize("other", [deaf, mute])
def test_a_mixer_that_computes_beside_its_cache_is_refused(other: Any) -> None:
    with pytest.raises(ModelError, match="mixer goes on from a state where its model was studied, and not on this"):
        run_in_chunks(MIXER, ALONE, other, (torch.ones(1, 4, 4),), {})
