"""Finds mixers that go on from the state behind the rows before: state-space models, linear attention, convolutions.

transformers hands them that state in a cache, for prompts that are read in parts. A mixer that takes a `cache` is asked
on fake tensors: it has to use the state of its recurrence, to take the rows ahead of its convolution, and to say what
it leaves behind. One that reads a state for the next token alone (Mamba's first scan) does not carry it, nor one that
asks its cache for anything else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from shardwise._torch_compat.tracing import tree_leaves
from shardwise.model.facts import CarriedState
from shardwise.model.stage_cut import leaves_of_graph

CACHE = "cache"  # transformers' name of the argument


class _Asked:
    """A cache that notes what it is asked for; only what carries a state can be."""

    def __init__(self, state: Tensor | None) -> None:
        self.state, self.before, self.after = state, None, None  # type: tuple[Any, Any, Any]

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Say that no single token follows."""

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.state

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, *, conv_kernel_size: int, **kwargs: Any
    ) -> Tensor:
        assert self.before is None and state_idx == 0
        self.before = conv_states.new_empty(*conv_states.shape[:-1], conv_kernel_size - 1, requires_grad=True)
        return torch.cat([self.before, conv_states], -1)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        assert self.after is None and state_idx == 0
        self.after = recurrent_states
        return recurrent_states

    def is_recording_past(self, layer_idx: int) -> bool:
        return False


def carried_state(forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> CarriedState | None:
    """Return what a mixer carries on when it is given some rows and a cache; None where it cannot go on from one.

    Args:
        forward: the mixer's own; its tensors are fake.
        args, kwargs: a call with some rows of hidden states.
    """
    if not _takes_cache(forward, args, kwargs):
        return None
    with suppress(Exception), torch.enable_grad():  # any code may run in a model's forward
        first = _Asked(None)
        forward(*args, **{**kwargs, CACHE: first})
        state = None if first.after is None else torch.empty_like(first.after, requires_grad=True)
        asked = _Asked(state)
        results = [leaf for leaf in tree_leaves(forward(*args, **{**kwargs, CACHE: asked})) if isinstance(leaf, Tensor)]
        given = [tensor for tensor in (asked.before, state) if tensor is not None]
        if given and {id(tensor) for tensor in given} <= leaves_of_graph(results):  # it uses them
            recurrent, ahead = (None if tensor is None else tuple(tensor.shape[1:]) for tensor in (state, asked.before))
            return CarriedState(recurrent, ahead)
    return None


def _takes_cache(forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    names = [*inspect.signature(forward).parameters]
    return CACHE in names[len(args) :] and kwargs.get(CACHE) is None
