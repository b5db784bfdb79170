"""What a script has a DistributedModel call once it is distributed, and after its first step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch.utils.hooks import RemovableHandle

from shardwise.smp.exceptions import StepUsageError
from shardwise.smp.process import state

Hook = Callable[[Any, Any], Any]


class Hooks:
    """A part of DistributedModel, which has the attributes."""

    _after_partition: OrderedDict[int, Hook]
    _after_step: OrderedDict[int, Hook]

    @property
    def partitioned(self) -> bool:
        """Whether the model has been distributed."""
        raise NotImplementedError

    def _call(self, hooks: OrderedDict[int, Hook]) -> None:
        optimizer = state.optimizer.public if state.optimizer is not None else None
        for hook in list(hooks.values()):
            hook(self, optimizer)

    def register_post_partition_hook(self, hook: Hook) -> RemovableHandle:
        """Call `hook(model, optimizer)` once the model has been distributed; at once where it is."""
        handle = _register(self._after_partition, hook)
        if self.partitioned:
            self._call(OrderedDict({handle.id: hook}))
        return handle

    def register_post_step_hook(self, hook: Hook) -> RemovableHandle:
        """Call `hook(model, optimizer)` after the first step."""
        return _register(self._after_step, hook)

    def register_comm_hook(self, hook_state: Any, hook: Any) -> None:
        """Refused: FSDP2 reduces gradients, and has no hooks of DDP."""
        raise StepUsageError("register_comm_hook is not to be had: gradients are reduced by FSDP2; leave it out")


def _register(hooks: OrderedDict[int, Hook], hook: Hook) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
