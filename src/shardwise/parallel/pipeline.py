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

from shardwise._torch_compat.pipelining import LazyStage, UnpairedDualPipeV, waiting_in
from shardwise.collectives.names import CollectiveName
from shardwise.errors import ConfigError, ModelError
from shardwise.job.axes import Axis
from shardwise.kernels.linear import WeightGradients
from shardwise.kernels.precision import torch_dtype
from shardwise.parallel.layout import Layout
from shardwise.parallel.stage_boundary import StageBoundary
from shardwise.parallel.stage_writes import StageWrites
from shardwise.plan.plan import Plan
from shardwise.words import listed

# By `parallel.pipeline`, for one stage on each rank and for several.
SCHEDULES: dict[str, tuple[Any, Any]] = {
    "simple": (ScheduleGPipe, None),
    "interleaved": (Schedule1F1B, ScheduleInterleaved1F1B),
    "zero_bubble": (None, ScheduleInterleavedZeroBubble),
    "zbv": (None, ScheduleZBVZeroBubble),
    "dualpipev": (None, UnpairedDualPipeV),
}

# Runs one microbatch of one part: (part, microbatch, boundary input) -> boundary output, or the seeded loss.
MicrobatchWork = Callable[[int, int, Tensor | None], Tensor]


class Pipeline:
    """This rank's stages and their traffic.

    Args:
        boundaries: of this rank's parts, in order.
        hidden: shape of one sample's hidden states between stages.
        writes: of each part, what finds parameters that a later microbatch writes; None where none can.
    """

    def __init__(
        self,
        plan: Plan,
        layout: Layout,
        boundaries: Sequence[StageBoundary],
        hidden: Sequence[int],
        device: torch.device,
        writes: Sequence[StageWrites | None],
    ) -> None:
        self.plan, self.boundaries, self.device, self.writes = plan, boundaries, device, writes
        self.group = layout.group(Axis.PIPELINE)
        self.ranks = dist.get_process_group_ranks(self.group)
        self.shape, self._positions = (plan.microbatch, *hidden), plan.positions
        self.dtype = torch_dtype(plan.dtypes.compute)
        stages = listed(f"stage {boundary.stage}" for boundary in boundaries)
        self._traffic = CollectiveName(stages, Axis.PIPELINE, "batch_isend_irecv")
        self.work: MicrobatchWork | None = None
        self.begin: Callable[[int, bool], None] | None = None
        self._schedule: Any = None
        self._made_for: Any = None

    @property
    def last_rank(self) -> int:
        """The global rank that holds the last stage."""
        return self._rank_of(self.boundaries[0].stages - 1)

    def _rank_of(self, stage: int) -> int:
        return self.ranks[self.plan.stage_ranks[stage]]

    def train(
        self,
        work: MicrobatchWork,
        begin: Callable[[int, bool], None],
        count: int,
        weight_gradients: Sequence[WeightGradients | None],
    ) -> None:
        """Run forward and backward of `count` microbatches in the plan's schedule. Collective over the pipeline group.

        Args:
            work: runs a microbatch of a part; of the last stage it returns the loss times the seed of backward.
            begin: told (part, whether it is the part's last) before each backward.
            weight_gradients: of each part, those that its backward leaves for later.
        """
        self.work, self.begin = work, begin
        needs = (count, [self.shapes(boundary) for boundary in self.boundaries])
        if self._schedule is None or self._made_for != needs:
            self._schedule, self._made_for = self._make_schedule(count, weight_gradients), needs
        first = (torch.zeros(count),) if self.boundaries[0].is_first else ()
        target = {"target": torch.zeros(count)} if self.boundaries[-1].is_last else {}
        cause: BaseException | None = None
        try:
            with waiting_in(self._traffic):
                self._schedule.step(*first, **target)
        except RuntimeError as error:  # torch wraps what a stage raises, a script's own mistake too
            cause = error.__cause__
            if cause is None or type(error) is not RuntimeError:
                self._traffic.attach(error)
                raise
        finally:
            self.work = self.begin = None
        if cause is not None:
            raise cause  # here, where torch's is not shown above it, and with its own cause

    def reshape(self, rows: int, positions: int) -> None:
        """Make ready for hidden states [rows, positions, H], if they were of another shape before.

        A user's own module may have others, of which the rows change.
        """
        inner = self.shape[1:]
        if len(inner) == 2 and inner[0] == self._positions:
            inner, self._positions = (positions, inner[1]), positions
        self.shape = (rows, *inner)

    def shapes(self, boundary: StageBoundary) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of a stage's boundary input and output as they travel."""
        if boundary.room is not None:
            return boundary.room[:1], boundary.room[1:]
        return boundary.shapes or (self.shape, self.shape)

    def evaluate(self, work: MicrobatchWork, count: int, shape: tuple[int, ...] | None = None) -> list[Tensor]:
        """Run forward alone; return what the last stage's `work` returned, nothing on other ranks. Collective.

        Args:
            shape: of the hidden states, if it is not that of training.
        """
        results: list[Tensor] = []
        sending: list[tuple[CollectiveName, Any, Tensor]] = []
        kept: dict[tuple[int, int], Tensor] = {}  # for this rank's own next stage, where a V turns
        for part, index in self._turns(count):
            boundary, arrived = self.boundaries[part], kept.pop((part, index), None)
            if arrived is None:
                arrived = self._receive(boundary, shape or self.shapes(boundary)[0])
            value = work(part, index, arrived)
            if boundary.is_last:
                results.append(value)
            elif (target := self._rank_of(boundary.stage + 1)) == dist.get_rank():
                kept[part + 1, index] = value
            else:
                name = CollectiveName(f"stage {boundary.stage}", Axis.PIPELINE, "send")
                sending.append((name, dist.isend(value, target, group=self.group), value))
        for name, handle, _ in sending:
            with name:
                handle.wait()
        return results

    def _turns(self, count: int) -> Iterator[tuple[int, int]]:
        """Yield (part, microbatch) of a forward, part by part, so that no rank waits for a microbatch to come round.

        Two ranks go microbatch by microbatch: NCCL does what passes between two ranks one after the other, either way,
        so that both have to send and receive in the same order.
        """
        parts = range(len(self.boundaries))
        if len(self.ranks) == 2:
            return ((part, index) for index in range(count) for part in parts)
        return ((part, index) for part in parts for index in range(count))

    def _receive(self, boundary: StageBoundary, shape: tuple[int, ...]) -> Tensor | None:
        if boundary.is_first:
            return None
        arrived = torch.empty(shape, dtype=self.dtype, device=self.device)
        with CollectiveName(f"stage {boundary.stage}", Axis.PIPELINE, "recv"):
            dist.recv(arrived, self._rank_of(boundary.stage - 1), group=self.group)
        return arrived

    def _make_schedule(self, count: int, weight_gradients: Sequence[WeightGradients | None]) -> Any:
        parts = enumerate(zip(self.boundaries, weight_gradients, strict=True))
        stages = [_PartStage(self, part, boundary, deferred) for part, (boundary, deferred) in parts]
        name = self.plan.job.parallel.pipeline
        single, multiple = SCHEDULES[name]
        arguments: Any = {"loss_fn": lambda output, target: output, "scale_grads": False}
        try:
            if single and len(stages) == 1:
                return single(stages[0], count, **arguments)
            return multiple(stages, count, **arguments)
        except ValueError as error:  # a plan has been judged before; a loop of one's own brings what it brings
            raise ConfigError(
                f"parallel.pipeline={name} does not take steps of {count} microbatches ({str(error).rstrip('.')}); "
                "bring as many to each step as there are stages, or a multiple, or use parallel.pipeline simple"
            ) from error


class _PartStage(LazyStage):
    """torch's stage over a part that is no child of it.

    Torch would see FSDP2's modules in a child and keep whole gradients until the last backward; here FSDP2's own hooks
    reduce-scatter after every one.
    """

    def __init__(
        self, pipeline: Pipeline, part: int, boundary: StageBoundary, weight_gradients: WeightGradients | None
    ) -> None:
        boundary_input, boundary_output = (
            torch.empty(shape, dtype=pipeline.dtype, device="meta", requires_grad=True)
            for shape in pipeline.shapes(boundary)
        )
        loss = torch.empty(1, dtype=torch_dtype(pipeline.plan.dtypes.loss), device="meta", requires_grad=True)
        self._runner = runner = _MicrobatchRunner(pipeline, part, boundary)
        super().__init__(
            runner,
            boundary.stage,
            boundary.stages,
            pipeline.device,
            input_args=(torch.empty(1, device="meta") if boundary.is_first else boundary_input,),
            output_args=(loss if boundary.is_last else boundary_output,),
            group=pipeline.group,
            dw_builder=None if weight_gradients is None else weight_gradients.take,
        )
        self._pipeline, self._part, self._writes = pipeline, part, pipeline.writes[part]
        self._weight_gradients = weight_gradients

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._runner.number = fwd_chunk_id  # as a number: a tensor's value would not be known in a traced job
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if self._writes is not None:
            self._writes.after_forward(fwd_chunk_id)
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        assert self._pipeline.begin is not None
        if self._writes is not None:
            self._writes.before_backward(bwd_chunk_id)
        if self._weight_gradients is not None:
            self._weight_gradients.waits = not full_backward
        self._pipeline.begin(self._part, last_backward)
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)


class _MicrobatchRunner(nn.Module):
    """The module that torch's stage calls: boundary input of microbatch `number` -> output, or [1] the seeded loss."""

    def __init__(self, pipeline: Pipeline, part: int, boundary: StageBoundary) -> None:
        super().__init__()
        self.pipeline, self.part, self.boundary, self.number = pipeline, part, boundary, 0

    def forward(self, arrived: Tensor) -> Tensor:
        assert self.pipeline.work is not None
        value = self.pipeline.work(self.part, self.number, None if self.boundary.is_first else arrived)
        if self.boundary.is_last:
            # torch lets go of what made it, the hidden states too, unless it is a view. Some models' logits are fp32.
            return value.view(1).clone().to(torch_dtype(self.pipeline.plan.dtypes.loss))
        awaited = self.pipeline.shapes(self.boundary)[1]
        if value.shape != awaited or value.dtype != self.pipeline.dtype:
            raise ModelError(
                f"stage {self.boundary.stage} makes hidden states {list(value.shape)} of {value.dtype}, and the next "
                f"one waits for {list(awaited)} of {self.pipeline.dtype}; use pipeline_parallel_degree 1"
            )
        return value
