"""Checkpointed activations in host memory between forward and backward, loaded back ahead of their use.

On an accelerator copies run on a side stream into pinned memory and overlap with compute; SMP's
`activation_loading_horizon` says how many checkpoints ahead of backward are on their way back. On a CPU the same copies
go into a host pool.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from shardwise._torch_compat import accelerator
from shardwise.job.devices import copies_aside


class HostPool:
    """Host buffers by size, reused from step to step (pinned for an accelerator, where allocation is slow)."""

    def __init__(self, pinned: bool) -> None:
        self.pinned = pinned
        self._free: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = defaultdict(list)

    def take(self, like: Tensor) -> Tensor:
        """Return a buffer of `like`'s shape and dtype."""
        free = self._free[like.shape, like.dtype]
        return free.pop() if free else torch.empty(like.shape, dtype=like.dtype, pin_memory=self.pinned)

    def give_back(self, buffer: Tensor) -> None:
        self._free[buffer.shape, buffer.dtype].append(buffer)


class _Saved:
    """One checkpoint's input: on the host, on its way back, or back on the device."""

    def __init__(self, owner: ActivationOffload, value: Tensor) -> None:
        self.owner, self.device = owner, value.device
        self.host: Tensor | None = owner.pool.take(value)
        self.loaded: Tensor | None = None
        self.ready = owner.copy(value, self.host)

    def load(self) -> None:
        """Start the copy back; harmless when it has been started."""
        if self.loaded is None and self.host is not None:
            self.loaded = torch.empty_like(self.host, device=self.device)
            self.ready = self.owner.copy(self.host, self.loaded)

    def value(self) -> Tensor:
        self.load()
        if self.ready is not None:
            self.ready.wait()
        assert self.loaded is not None
        if self.host is not None:
            self.owner.pool.give_back(self.host)
            self.host = None
        return self.loaded


class ActivationOffload:
    """Moves the inputs of checkpoints to the host and prefetches `horizon` of them in backward.

    Args:
        device: where the model computes.
        horizon: checkpoints ahead of the one in use that are loaded back.
    """

    def __init__(self, device: torch.device, horizon: int) -> None:
        self.device, self.horizon = device, horizon
        aside = copies_aside(device.type)
        self.pool = HostPool(pinned=aside)
        self.stream = accelerator.side_stream(device) if aside else None
        self._order: list[_Saved] = []

    def checkpoint_input(self) -> AbstractContextManager[Any]:
        """Return the context in which one checkpoint is called; its saved input goes to the host."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def copy(self, source: Tensor, target: Tensor) -> torch.Event | None:
        """Copy without blocking the compute stream; the event says when it is done (None: it already is)."""
        if self.stream is None:
            target.copy_(source)
            return None
        self.stream.wait_stream(accelerator.current_stream(self.device))
        with self.stream:
            target.copy_(source, non_blocking=True)
            event = self.stream.record_event()
        for tensor in (source, target):
            if accelerator.on_accelerator(tensor):
                tensor.record_stream(self.stream)
        return event

    def _pack(self, value: Tensor) -> Any:
        if value.device != self.device or value.numel() == 0 or not value.is_floating_point():
            return value
        saved = _Saved(self, value.detach())
        self._order.append(saved)
        return saved

    def _unpack(self, saved: Any) -> Tensor:
        if not isinstance(saved, _Saved):
            value: Tensor = saved
            return value
        if saved in self._order:  # for the first time; a gradient of a gradient goes through a graph again
            position = self._order.index(saved)
            for ahead in self._order[max(0, position - self.horizon) : position]:
                ahead.load()
            del self._order[position]
        return saved.value()
