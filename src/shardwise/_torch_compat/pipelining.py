"""Torch's pipeline stages and schedules, changed where they have no public way to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ContextDecorator, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, ScheduleDualPipeV, schedules

# No public name: the operator by which `pipe_split()` leaves its mark in a graph (torch 2.11 to 2.14).
from torch.distributed.pipelining._IR import aten_pipe_split_alias as CUT_MARK

__all__ = ["CUT_MARK", "LazyStage", "UnpairedDualPipeV", "stages_made_ready_in", "waiting_in"]


@contextmanager
def waiting_in(scope: AbstractContextManager[Any]) -> Iterator[None]:
    """Let schedules wait for their messages in `scope`, which is entered for each wait."""
    wait = schedules._wait_batch_p2p  # no public name (torch 2.11 to 2.14)

    def wait_in_scope(work: list[dist.Work]) -> None:
        with scope:
            wait(work)

    schedules._wait_batch_p2p = wait_in_scope
    try:
        yield
    finally:
        schedules._wait_batch_p2p = wait


@contextmanager
def stages_made_ready_in(scope: ContextDecorator) -> Iterator[None]:
    """Let schedules make their stages ready in `scope`, as they do ahead of their first step."""
    # No public names (torch 2.11 to 2.14).
    single, multi = schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti
    with (
        mock.patch.object(single, "_initialize_stage", scope(single._initialize_stage)),
        mock.patch.object(multi, "_initialize_stages", scope(multi._initialize_stages)),
    ):
        yield


class UnpairedDualPipeV(ScheduleDualPipeV):
    """DualPipeV whose paired forward and backward are two actions, so that what the first made leaves before the second
    runs. Torch sends after the pair, which holds up the next rank where the two do not run at once: 2(p - 1) units of
    idle time instead of p - 1, measured and counted."""

    # No public name: a schedule's order can be changed by this method alone (torch 2.11 to 2.13).
    def _calculate_single_rank_operations(self, rank: int) -> Any:
        paired = super()._calculate_single_rank_operations(rank)
        return [step for action in paired if action is not None for step in action.sub_actions or (action,)]


# No public names: torch's stage makes a buffer for every microbatch of a step before the first (torch 2.11 to 2.13, a
# TODO there), which for hundreds of them is more memory than anything else on the rank.
class LazyStage(PipelineStage):
    """Torch's stage, with memory for a hidden state or gradient from when it is on its way to when it has been read."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Return what opens the connections, except those to itself: in a V both stages of a pair lie on one rank."""
        operations: list[dist.P2POp] = super()._get_init_p2p_neighbors_ops()
        return [operation for operation in operations if operation.group_peer != self.group_rank]

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._described(self.args_recv_info):
            return super()._prepare_forward_infra(*args, **kwargs)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._described(self.grad_recv_info):
            return super()._prepare_backward_infra(*args, **kwargs)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        for info in _received(self.args_recv_info[fwd_chunk_id]):
            info.buffer = self._room(info.buffer, self.has_backward)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        for info in _received(self.grad_recv_info[bwd_chunk_id]):
            info.buffer = self._room(info.buffer)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        _let_go(self.args_recv_info[fwd_chunk_id])  # the stage has it until its backward
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        _let_go(self.grad_recv_info[bwd_chunk_id])

    def _room(self, like: Tensor, requires_grad: bool = False) -> Tensor:
        return torch.empty(like.shape, dtype=like.dtype, device=self.device, requires_grad=requires_grad)

    @contextmanager
    def _described(self, infos: Mapping[int, Sequence[Any]]) -> Iterator[None]:
        """Let what torch makes meanwhile for `infos` have a shape and no memory."""
        device, self.device = self.device, torch.device("meta")
        try:
            yield
        finally:
            self.device = device
            for of_microbatch in infos.values():
                _let_go(of_microbatch)


def _received(infos: Sequence[Any]) -> list[Any]:
    """Without what comes from the schedule itself."""
    return [info for info in infos if getattr(info, "buffer", None) is not None]


def _let_go(infos: Sequence[Any]) -> None:
    for info in _received(infos):
        info.buffer = torch.empty((), dtype=info.buffer.dtype, device="meta").expand(info.buffer.shape)
