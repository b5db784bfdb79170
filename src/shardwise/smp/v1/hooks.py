"""What a script has a DistributedModel call: once it is distributed, after its first step, for its gradients."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch.utils.hooks import RemovableHandle

from shardwise.parallel.model import ParallelModel
from shardwise.smp.v1.communication_hook import CommunicationHook
from shardwise.smp.v1.exceptions import SMPValidationError, StepUsageError
from shardwise.smp.v1.process import state

Hook = Callable[[Any, Any], Any]


class Hooks:
    """A part of DistributedModel, which has the attributes."""

    _after_partition: OrderedDict[int, Hook]
    _after_step: OrderedDict[int, Hook]
    parallel: ParallelModel | None
    communication: CommunicationHook | None
    overlapping: bool
    bucket_mb: float
    reduced: bool

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

    def register_comm_hook(self, state: Any, hook: Callable[[Any, Any], Any]) -> None:
        """Let `hook(state, bucket)` take the mean of gradients, in the place of the library; once, before the first
        backward.

        The bucket is as DistributedDataParallel's: `buffer()`, `gradients()`, `parameters()`, `index()`, `is_last()`,
        `set_buffer(tensor)`. It holds sums over microbatches, divided by nothing (under fp16 times the loss scale). The
        hook returns a future of one tensor of as many elements: the mean over `smp.get_rdp_process_group()`, without
        tensor parallelism the data ranks, and over the microbatches. A bucket comes when the future of the one before
        it is done.

        Raises:
            SMPUnsupportedError: parameters, gradients or the optimizer's state are sharded.
            SMPValidationError: `overlapping_allreduce` is False; `hook` cannot be called, or is torch's own with a
                group of ranks that hold different parameters.
            StepUsageError: there is a hook already, or a backward was run.
        """
        if not self.overlapping:
            raise SMPValidationError(
                "register_comm_hook needs overlapping_allreduce=True, and DistributedModel was given False; leave that "
                "out"
            )
        if self.communication is not None:
            raise StepUsageError("register_comm_hook was called before: a model has one communication hook")
        if self.reduced:
            raise StepUsageError("register_comm_hook comes after a backward; call it before the first step")
        self.communication = CommunicationHook(state, hook, self.bucket_mb)
        if self.parallel is not None:
            self.communication.install(self.parallel)


def _register(hooks: OrderedDict[int, Hook], hook: Hook) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
