"""Pipeline parallelism: the schedule that drives this rank's stages, and their traffic.

Schedules are torch's: fill-drain (GPipe, arXiv 1811.06965), 1F1B and its interleaved form (arXiv 2104.04473, sections
2.2.1 and 2.2.2), and the latter with the gradients of weights put off to where a rank would idle (ZB1P, arXiv
2401.10241, section 2). In a V (ZB-V, section 6 there; DualPipeV after arXiv 2412.19437, section 3.2.1) stages go down
the ranks and up again, so that the ends of the model meet on rank 0, and tied embeddings are one parameter there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from shardwise._torch_compat import LazyStage, UnpairedDualPipeV
from shardwise.errors import ModelError
from shardwise.job.axes import Axis
from shardwise.kernels.linear import WeightGradients
from shardwise.kernels.precision import torch_dtype
from shardwise.parallel.layout import Layout
from shardwise.parallel.transforms.stages import Passage
from shardwise.plan.plan import Plan

# By `parallel.pipeline`, for one stage on each rank and for several.
SCHEDULES: dict[str, tuple[Any, Any]] = {
    "simple": (ScheduleGPipe, None),
    "interleaved": (Schedule1F1B, ScheduleInterleaved1F1B),
    "zero_bubble": (None, ScheduleInterleavedZeroBubble),
    "zbv": (None, ScheduleZBVZeroBubble),
    "dualpipev": (None, UnpairedDualPipeV),
}

# Runs one microbatch of one part: (part, microbatch, arrived hidden states) -> what leaves, or the seeded loss.
Work = Callable[[int, int, Tensor | None], Tensor]


class Pipeline:
    """This rank's stages and their traffic.

    Args:
        passages: of this rank's parts, in order.
        hidden: shape of one sample's hidden states between stages.
    """

    def __init__(
        self, plan: Plan, layout: Layout, passages: Sequence[Passage], hidden: Sequence[int], device: torch.device
    ):
        self.plan, self.passages, self.device = plan, passages, device
        self.group = layout.group(Axis.PIPELINE)
        self.ranks = dist.get_process_group_ranks(self.group)
        self.shape, self._positions = (plan.microbatch, *hidden), plan.positions
        self.dtype = torch_dtype(plan.dtypes.compute)
        self.work: Work | None = None
        self.begin: Callable[[int, bool], None] | None = None
        self._schedule: Any = None
        self._made_for: Any = None

    @property
    def last_rank(self) -> int:
        """The global rank that holds the last stage."""
        return self._rank_of(self.passages[0].stages - 1)

    def _rank_of(self, stage: int) -> int:
        return self.ranks[self.plan.stage_ranks[stage]]

    def train(
        self,
        work: Work,
        begin: Callable[[int, bool], None],
        count: int,
        later: Sequence[WeightGradients | None],
    ) -> None:
        """Forward and backward of `count` microbatches in the plan's schedule. Collective over the pipeline group.

        Args:
            work: runs a microbatch of a part; of the last stage it returns the loss times the seed of backward.
            begin: told (part, whether it is the part's last) before each backward.
            later: of each part, what its backward leaves for later.
        """
        self.work, self.begin = work, begin
        shapes = [self.shapes(passage) for passage in self.passages]
        if self._schedule is None or self._made_for != shapes:
            self._schedule, self._made_for = self._make_schedule(count, later), shapes
        first = (torch.zeros(count),) if self.passages[0].is_first else ()
        target = {"target": torch.zeros(count)} if self.passages[-1].is_last else {}
        own: BaseException | None = None
        try:
            self._schedule.step(*first, **target)
        except RuntimeError as error:  # torch wraps what a stage raises, a script's own mistake too
            own = error.__cause__
            if own is None or type(error) is not RuntimeError:
                raise
        finally:
            self.work = self.begin = None
        if own is not None:
            raise own  # here, where torch's is not shown above it, and with its own cause

    def reshape(self, rows: int, positions: int) -> None:
        """Make ready for hidden states [rows, positions, H], if they were of another shape before; a user's own module
        may have others, of which the rows change."""
        inner = self.shape[1:]
        if len(inner) == 2 and inner[0] == self._positions:
            inner, self._positions = (positions, inner[1]), positions
        self.shape = (rows, *inner)

    def shapes(self, passage: Passage) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of what arrives at a stage and of what leaves it."""
        return passage.shapes or (self.shape, self.shape)

    def evaluate(self, work: Work, count: int, shape: tuple[int, ...] | None = None) -> list[Tensor]:
        """Forward alone; what the last stage's `work` returned, nothing on other ranks. Collective.

        Args:
            shape: of the hidden states, if it is not that of training.
        """
        results: list[Tensor] = []
        sending: list[tuple[Any, Tensor]] = []
        here: dict[tuple[int, int], Tensor] = {}  # for this rank's own next stage, where a V turns
        for part, index in self._turns(count):
            passage, arrived = self.passages[part], here.pop((part, index), None)
            if arrived is None:
                arrived = self._receive(passage, shape or self.shapes(passage)[0])
            value = work(part, index, arrived)
            if passage.is_last:
                results.append(value)
            elif (target := self._rank_of(passage.stage + 1)) == dist.get_rank():
                here[part + 1, index] = value
            else:
                sending.append((dist.isend(value, target, group=self.group), value))
        for handle, _ in sending:
            handle.wait()
        return results

    def _turns(self, count: int) -> Iterator[tuple[int, int]]:
        """(part, microbatch) of a forward, part by part, so that no rank waits for a microbatch to come round.

        Of two ranks microbatch by microbatch: NCCL does what passes between two ranks one after the other, either way,
        so that both have to send and receive in the same order.
        """
        parts = range(len(self.passages))
        if len(self.ranks) == 2:
            return ((part, index) for index in range(count) for part in parts)
        return ((part, index) for part in parts for index in range(count))

    def _receive(self, passage: Passage, shape: tuple[int, ...]) -> Tensor | None:
        if passage.is_first:
            return None
        arrived = torch.empty(shape, dtype=self.dtype, device=self.device)
        dist.recv(arrived, self._rank_of(passage.stage - 1), group=self.group)
        return arrived

    def _make_schedule(self, count: int, later: Sequence[WeightGradients | None]) -> Any:
        parts = enumerate(zip(self.passages, later, strict=True))
        stages = [_Stage(self, part, passage, left) for part, (passage, left) in parts]
        single, multiple = SCHEDULES[self.plan.job.parallel.pipeline]
        arguments: Any = {"loss_fn": lambda output, target: output, "scale_grads": False}
        if single and len(stages) == 1:
            return single(stages[0], count, **arguments)
        return multiple(stages, count, **arguments)


class _Stage(LazyStage):
    """torch's stage over a part that is no child of it.

    Torch would see FSDP2's modules in a child and keep whole gradients until the last backward; here FSDP2's own hooks
    reduce-scatter after every one.
    """

    def __init__(self, pipeline: Pipeline, part: int, passage: Passage, later: WeightGradients | None) -> None:
        arriving, leaving = (
            torch.empty(shape, dtype=pipeline.dtype, device="meta", requires_grad=True)
            for shape in pipeline.shapes(passage)
        )
        loss = torch.empty(1, dtype=torch_dtype(pipeline.plan.dtypes.loss), device="meta", requires_grad=True)
        self._runner = runner = _Runner(pipeline, part, passage)
        super().__init__(
            runner,
            passage.stage,
            passage.stages,
            pipeline.device,
            input_args=(torch.empty(1, device="meta") if passage.is_first else arriving,),
            output_args=(loss if passage.is_last else leaving,),
            group=pipeline.group,
            dw_builder=None if later is None else later.take,
        )
        self._pipeline, self._part = pipeline, part

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """What opens the connections, but those to itself: in a V both stages of a neighbourhood lie on one rank."""
        return [one for one in super()._get_init_p2p_neighbors_ops() if one.group_peer != self.group_rank]

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._runner.number = fwd_chunk_id  # as a number: a tensor's value would not be known in a dry run
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        assert self._pipeline.begin is not None
        self._pipeline.begin(self._part, last_backward)
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)


class _Runner(nn.Module):
    """What a stage calls: hidden states of microbatch `number` -> hidden states, or [1] the seeded loss."""

    def __init__(self, pipeline: Pipeline, part: int, passage: Passage) -> None:
        super().__init__()
        self.pipeline, self.part, self.passage, self.number = pipeline, part, passage, 0

    def forward(self, arrived: Tensor) -> Tensor:
        assert self.pipeline.work is not None
        value = self.pipeline.work(self.part, self.number, None if self.passage.is_first else arrived)
        if self.passage.is_last:
            return value.view(1).clone()  # torch lets go of what made it, the hidden states too, unless it is a view
        awaited = self.pipeline.shapes(self.passage)[1]
        if value.shape != awaited or value.dtype != self.pipeline.dtype:
            raise ModelError(
                f"stage {self.passage.stage} makes hidden states {list(value.shape)} of {value.dtype}, and the next "
                f"one waits for {list(awaited)} of {self.pipeline.dtype}; use pipeline_parallel_degree 1"
            )
        return value
