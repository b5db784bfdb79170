"""Synchronisation of gradients after each backward: two-hop reduction (MiCS, arXiv 2205.00119, section 4.3).

Within a shard group gradients are reduce-scattered every micro-step; replicas all-reduce once, on the last. A group of
one rank has nothing to scatter: FSDP2 would cast its weights and copy its gradients in every micro-step.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.fsdp import FSDPModule

from shardwise._torch_compat.fsdp2 import reduce_left_gradients
from shardwise.job.axes import Axis
from shardwise.plan.plan import Plan


def begin_microbatch(modules: Sequence[FSDPModule], plan: Plan, last: bool, is_first_sum: bool = False) -> None:
    """Say what the coming backward synchronises: on the last one all, before it nothing (ZeRO-1) or the shard group.

    A backward that leaves weight gradients for later synchronises nothing; `reduce_gradients` follows.

    Args:
        modules: of one root, which is the first.
        plan: what runs.
        last: whether the backward completes the gradients.
        is_first_sum: whether they began with this step's first microbatch. Else a sum apart would be rounded otherwise
            than one that goes on.
    """
    for module in modules:
        if plan.holds_whole:
            last = last and not plan.splits_backward
            module.set_requires_gradient_sync(last, recurse=False)
            module.set_reshard_after_backward(last, recurse=False)
        else:
            module.set_requires_all_reduce(last, recurse=False)
    if plan.adds_whole and is_first_sum:
        _leave_whole(modules, plan, last)
    if modules and plan.degrees[Axis.PIPELINE] > 1:
        # FSDP2 gathers the root when its output's gradient arrives; a stage's gradient arrives at what left it instead.
        modules[0].unshard()


def _leave_whole(modules: Sequence[FSDPModule], plan: Plan, last: bool) -> None:
    """Have FSDP2 add gradients up as they are, in the dtype of reduction, and keep what is needed again anyway."""
    for module in modules:
        keeps = plan.keeps_between_microbatches or module is modules[0]
        module.set_requires_gradient_sync(last, recurse=False)
        module.set_reshard_after_backward(last or not keeps, recurse=False)


def reduce_gradients(modules: Sequence[FSDPModule]) -> None:
    """Reduce what backwards have left, whole or summed over the shards alone, and free the gathered parameters."""
    for module in modules:
        module.set_requires_all_reduce(True, recurse=False)
        module.set_requires_gradient_sync(True, recurse=False)
        module.set_reshard_after_backward(True, recurse=False)
    reduce_left_gradients(modules)
