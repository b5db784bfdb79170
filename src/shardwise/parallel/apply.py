"""parallelize(): one fixed order in which a model on the meta device becomes this rank's part of it.

Read this file, parallel/model.py and training/step.py and you have seen the whole of distributed training.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext

import torch
from torch import nn

from shardwise.errors import require_type
from shardwise.job.axes import Axis
from shardwise.model.facts import ModelFacts
from shardwise.parallel.builder import Allocation, BuildInputs, ModelBuilder, Transform
from shardwise.parallel.layout import Layout
from shardwise.parallel.model import ParallelModel
from shardwise.parallel.transforms.adapters import LowRankAdapters
from shardwise.parallel.transforms.attention import AttentionKernels
from shardwise.parallel.transforms.boundary_shapes import BoundaryShapesOfStages
from shardwise.parallel.transforms.checkpointing import ActivationCheckpointing
from shardwise.parallel.transforms.compile import CompiledBlocks
from shardwise.parallel.transforms.context import ContextParallelism
from shardwise.parallel.transforms.dropout import LayoutIndependentDropout
from shardwise.parallel.transforms.dtypes import ParameterDtypes
from shardwise.parallel.transforms.expert import ExpertParallelism
from shardwise.parallel.transforms.float8 import Float8Linears
from shardwise.parallel.transforms.freeze import FrozenParameters
from shardwise.parallel.transforms.fused_kernels import FusedKernels
from shardwise.parallel.transforms.loss import HeadInLoss
from shardwise.parallel.transforms.materialize import Materialization
from shardwise.parallel.transforms.offload import OffloadedActivations
from shardwise.parallel.transforms.packed_base import PackedBase
from shardwise.parallel.transforms.routers import WatchedRouters
from shardwise.parallel.transforms.sequence import SequenceParallelism
from shardwise.parallel.transforms.sharding import ShardedParameters
from shardwise.parallel.transforms.stages import BlockStages
from shardwise.parallel.transforms.tensor import TensorParallelism
from shardwise.parallel.transforms.traced_stages import TracedStages
from shardwise.parallel.transforms.weight_gradients import DeferredWeightGradients
from shardwise.plan.plan import Plan

logger = logging.getLogger("shardwise.parallel")

TRANSFORMS: tuple[Transform, ...] = (
    ParameterDtypes(),
    BoundaryShapesOfStages(),  # of attention as it is: kernels look into masks
    AttentionKernels(),
    ContextParallelism(),
    FusedKernels(),
    TensorParallelism(),
    ExpertParallelism(),
    WatchedRouters(),
    BlockStages(),
    TracedStages(),
    LowRankAdapters(),
    FrozenParameters(),
    PackedBase(),
    LayoutIndependentDropout(),
    HeadInLoss(),
    Float8Linears(),
    DeferredWeightGradients(),
    CompiledBlocks(),
    OffloadedActivations(),
    ActivationCheckpointing(),
    SequenceParallelism(),  # after checkpointing, so that what a checkpoint keeps is a part
    ShardedParameters(),
    Materialization(),
)


def parallelize(
    model: nn.Module,
    plan: Plan,
    layout: Layout,
    facts: ModelFacts,
    device: torch.device | None = None,
    allocation: Allocation = nullcontext,
) -> ParallelModel:
    """Make `model` (on the meta device) this rank's part of the job; weights are uninitialized until `initialize`.

    Args:
        model: the unmodified model; it is changed in place.
        plan: what will run.
        layout: where this rank stands.
        facts: the model's structure.
        device: where this rank computes; unset: the CPU or the current CUDA device.
        allocation: surrounds what gives parameters and buffers their storage; a traced job's gives them none.

    Raises:
        ConfigError: an argument is of another type.
    """
    require_type(model, nn.Module, "model", "build it with its parameters on the meta device")
    require_type(plan, Plan, "plan", "shardwise.resolve makes it of a Job")
    require_type(layout, Layout, "layout", "shardwise.Layout.from_plan makes it of a Plan")
    require_type(facts, ModelFacts, "facts", "shardwise.training.setup.study(job) gives those of the job's model")
    facts = facts.for_degrees(plan.degrees[Axis.TENSOR], plan.degrees[Axis.CONTEXT])
    inputs = BuildInputs(plan, layout, facts, device or torch.device(plan.world.device_type), allocation)
    build = ModelBuilder(model, plan.stages_of(layout.index(Axis.PIPELINE)))
    for transform in TRANSFORMS:
        if is_applied(transform, plan, facts):
            logger.debug("transform %s: applied, %d stage(s) on this rank", transform.name, len(build.stages))
            transform.apply(build, inputs)
    return build.finish(inputs)


def is_applied(transform: Transform, plan: Plan, facts: ModelFacts) -> bool:
    """Return True if the plan asks for `transform`; the one place where an axis of degree 1 is left out."""
    if transform.axis is not None and plan.degrees[transform.axis] == 1:
        return False
    return transform.applies(plan, facts)
