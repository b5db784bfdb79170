"""Mixers of a sequence in parts: a rank runs one on its own rows, with the state behind those before.

A rank has two chunks of every sequence (collectives/context.py), so that it runs a mixer twice. A state goes from chunk
to chunk, and so up the ranks and down again; its gradient comes back the other way. A mixer asks for its state before
anything else, so that a chunk begins when the one before is through its recurrence; no rank has whole sequences.

transformers' cache of linear attention brings the state to a mixer and takes it away (model/carried_state.py).
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwise._torch_compat.tracing import tree_flatten, tree_unflatten
from shardwise.collectives.handoff import Handoffs, tied
from shardwise.errors import ModelError
from shardwise.model.carried_state import CACHE
from shardwise.model.facts import CarriedState, GatheredModule


class Left(NamedTuple):
    """The state that a chunk leaves for the next.

    Attributes:
        recurrent: state [B, ...] of the recurrence.
        ahead: [B, C, positions] that the convolution reads ahead of the next chunk.
    """

    recurrent: Tensor | None
    ahead: Tensor | None


class ChunkCache:
    """A cache, as far as a mixer asks one, while it runs on one chunk.

    Args:
        form: of what it hands on.
        chunk: number of the chunk, of 2c.
        handoffs: of the ranks that share the sequence.
        hidden: of the chunk.
        before: what this rank's own chunk just before has left; the two in the middle are of one rank.
    """

    def __init__(self, form: CarriedState, chunk: int, handoffs: Handoffs, hidden: Tensor, before: Left | None) -> None:
        last = 2 * handoffs.group.size() - 1
        source = _owner(chunk - 1, last) if chunk else None
        self._form, self._handoffs, self._rows = form, handoffs, hidden.shape[0]
        self._target = _owner(chunk + 1, last) if chunk < last else None
        self._own = handoffs.group.rank()
        self._wide = torch.promote_types(hidden.dtype, torch.float32)  # in which no state loses anything
        self._recurrent: Tensor | None = None
        self._ahead: Tensor | None = None
        self.left: Left | None = None
        self.way_back: Tensor | None = None
        self._before = before
        if source is not None and source != self._own:
            self._before = self._split(self._taken(hidden, source))
        self._is_read = self._before is None or form.recurrent is None

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Say that no single token follows."""

    def is_recording_past(self, layer_idx: int) -> bool:
        """Say that nothing is rolled back."""
        return False

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the state [B, ...] of the recurrence behind the chunk before; None for the first."""
        self._is_read = True
        return None if self._before is None else self._before.recurrent

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, *, conv_kernel_size: int, **kwargs: Any
    ) -> Tensor:
        """Return what the convolution reads: [B, C, positions], with those ahead that it reaches."""
        count, whole = conv_kernel_size - 1, conv_states
        if self._before is not None and self._before.ahead is not None:
            whole = torch.cat([self._before.ahead.to(conv_states.dtype), conv_states], -1)
        missing = max(0, count - whole.shape[-1])
        self._ahead = F.pad(whole, (missing, 0))[..., whole.shape[-1] + missing - count :]
        self._hand_on()
        return whole

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Hand on the state of the recurrence behind this chunk."""
        self._recurrent = recurrent_states
        self._hand_on()
        return recurrent_states

    def check_used(self, name: str) -> None:
        """Refuse a mixer that has computed beside its cache, as a kernel may that takes whole sequences alone.

        Raises:
            ModelError: it has not read the state, or has left none.
        """
        if not self._is_read or (self._target is not None and self.left is None and self.way_back is None):
            raise ModelError(
                f"{name} goes on from a state where its model was studied, and not on this device; use "
                "context_parallel_degree 1"
            )

    def _hand_on(self) -> None:
        """Hand on what the next chunk begins with, as soon as all of it is known."""
        lacks_state = self._form.recurrent is not None and self._recurrent is None
        lacks_ahead = self._form.ahead is not None and self._ahead is None
        if self._target is None or lacks_state or lacks_ahead:
            return
        if self._target == self._own:
            self.left = Left(self._recurrent, self._ahead)
            return
        parts = [part.to(self._wide).flatten(1) for part in (self._recurrent, self._ahead) if part is not None]
        self.way_back = self._handoffs.give(torch.cat(parts, 1), self._target)

    def _taken(self, hidden: Tensor, source: int) -> Tensor:
        sizes = (prod(shape) for shape in (self._form.recurrent, self._form.ahead) if shape is not None)
        return self._handoffs.take(hidden.new_empty((self._rows, sum(sizes)), dtype=self._wide), source)

    def _split(self, taken: Tensor) -> Left:
        recurrent, ahead = self._form.recurrent, self._form.ahead
        size = 0 if recurrent is None else prod(recurrent)
        return Left(
            None if recurrent is None else taken[:, :size].unflatten(1, recurrent),
            None if ahead is None else taken[:, size:].unflatten(1, ahead),
        )


def _owner(chunk: int, last: int) -> int:
    """Return the rank that has a chunk."""
    return min(chunk, last - chunk)


def run_in_chunks(
    module: GatheredModule, handoffs: Handoffs, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]
) -> Any:
    """Run a mixer on this rank's two chunks, one after the other, and return what it makes of both."""
    assert module.carries is not None
    handoffs.settle()
    rank, last = handoffs.group.rank(), 2 * handoffs.group.size() - 1
    leaves, tree = tree_flatten((args, kwargs))
    halves = {number: leaves[number].chunk(2, 1) for number in module.arguments}
    left: Left | None = None
    made: list[list[Any]] = []
    for half, chunk in enumerate((rank, last - rank)):
        own = [halves[number][half] if number in halves else leaf for number, leaf in enumerate(leaves)]
        cache = ChunkCache(module.carries, chunk, handoffs, own[module.arguments[0]], left)
        own_args, own_kwargs = tree_unflatten(own, tree)
        results, form = tree_flatten(forward(*own_args, **{**own_kwargs, CACHE: cache}))
        cache.check_used(module.name)
        if cache.way_back is not None:
            results[module.results[0]] = tied(results[module.results[0]], cache.way_back)
        made.append(results)
        left = cache.left
    first, second = made
    joined = [torch.cat([leaf, second[n]], 1) if n in module.results else leaf for n, leaf in enumerate(first)]
    return tree_unflatten(joined, form)
