"""Hooks of a script on its DistributedModel: once it is distributed, after its first step, and for its gradients."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch.utils.hooks import RemovableHandle

from shardwise.smp.exceptions import SMPValidationError, StepUsageError
from shardwise.smp.v1.communication_hook import CommunicationHook
from shardwise.smp.v1.session import SmpSessionV1
from shardwise.smp.v1.weights import ModelWeights

ModelHook = Callable[[Any, Any], Any]  # of model and optimizer


class ModelHooks:
    """The hooks of a distributed model, the part of `DistributedModel` that keeps and calls them.

    Args:
        session: the session of this process, whose model and optimizer the hooks get.
        weights: the model's weights.
        overlapping: False refuses a communication hook.
        bucket_mb: MiB of gradients from which on a communication hook gets them.

    Attributes:
        communication: the script's communication hook.
        backward_has_run: no communication hook can come any more.
    """

    def __init__(self, session: SmpSessionV1, weights: ModelWeights, overlapping: bool, bucket_mb: float) -> None:
        self.communication: CommunicationHook | None = None
        self.backward_has_run = False
        self._session = session
        self._weights = weights
        self._overlapping = overlapping
        self._bucket_mb = bucket_mb
        self._after_partition: OrderedDict[int, ModelHook] = OrderedDict()
        self._after_step: OrderedDict[int, ModelHook] = OrderedDict()
        self._step_has_run = False

    def partitioned(self) -> None:
        """Install the communication hook and call the post-partition hooks: the model has been distributed."""
        if self.communication is not None:
            self.communication.install(self._weights.require_parallel())
        if self._session.optimizer is not None:
            self._session.optimizer.adopt(self._weights.require_parallel())
        self._call(self._after_partition)

    def stepped(self) -> None:
        """Call the post-step hooks, after the first step alone; an optimizer of any class has all its parts then."""
        if not self._step_has_run:
            self._step_has_run = True
            self._call(self._after_step)
            if self._session.optimizer is not None:
                self._session.optimizer.be_ready()

    def register_post_partition_hook(self, hook: ModelHook) -> RemovableHandle:
        """Call `hook(model, optimizer)` once the model has been distributed; at once where it is."""
        handle = _register(self._after_partition, hook)
        if self._weights.parallel is not None:
            self._call(OrderedDict({handle.id: hook}))
        return handle

    def register_post_step_hook(self, hook: ModelHook) -> RemovableHandle:
        """Call `hook(model, optimizer)` after the first step."""
        return _register(self._after_step, hook)

    def register_communication_hook(self, hook_state: Any, hook: Callable[[Any, Any], Any]) -> None:
        """Let `hook(hook_state, bucket)` take the mean of gradients; see `DistributedModel.register_comm_hook`."""
        if not self._overlapping:
            raise SMPValidationError(
                "register_comm_hook needs overlapping_allreduce=True, and DistributedModel was given False; leave that "
                "out"
            )
        if self.communication is not None:
            raise StepUsageError("register_comm_hook was called before: a model has one communication hook")
        if self.backward_has_run:
            raise StepUsageError("register_comm_hook comes after a backward; call it before the first step")
        self.communication = CommunicationHook(self._session, hook_state, hook, self._bucket_mb)
        if self._weights.parallel is not None:
            self.communication.install(self._weights.parallel)

    def _call(self, hooks: OrderedDict[int, ModelHook]) -> None:
        optimizer = self._session.optimizer.public if self._session.optimizer is not None else None
        for hook in list(hooks.values()):
            hook(self._session.model, optimizer)


def _register(hooks: OrderedDict[int, ModelHook], hook: ModelHook) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
