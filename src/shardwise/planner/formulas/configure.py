"""A TrainingConfiguration of a resolved Plan and discovered facts: what `shardwise train` would run, for `predict`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardwise.errors import LegalityError
from shardwise.job.axes import Axis
from shardwise.model.facts import ModelFacts
from shardwise.plan.draft import group_size
from shardwise.plan.plan import Plan
from shardwise.planner.constants.inventory import own_stack
from shardwise.planner.formulas.communication import ExpertGroups
from shardwise.planner.formulas.prediction import Cluster, ModelShape, Stack, TrainingConfiguration


def configuration_of(
    plan: Plan, facts: ModelFacts, cluster: Cluster, stack: Stack | None = None, shape: ModelShape | None = None
) -> TrainingConfiguration:
    """The configuration of `plan` on `cluster`. `shape`, where it is known, spares reading it off the facts again.

    Raises:
        LegalityError: nothing is known of the time of such a plan.
    """
    _refuse_gathered_outputs(plan, facts)
    job, degrees = plan.job, plan.degrees
    memory, parallel = job.memory, job.parallel
    dropout = bool(job.model.dropout) or facts.has_attention_dropout
    sizes: dict[str, Any] = {str(axis): degree for axis, degree in degrees.items()}
    configuration = TrainingConfiguration(
        **sizes,
        model=shape or ModelShape.of(facts),
        cluster=cluster,
        stack=_stack(stack or own_stack(), dropout),
        sequence=facts.positions(plan.sequence_length),
        microbatch=plan.microbatch,
        accumulation=plan.accumulation,
        padding=plan.microbatch * plan.accumulation * plan.data_ranks - plan.sequences_per_step,
        virtual=len(plan.stages) // degrees[Axis.PIPELINE] if plan.stages else 1,
        schedule=parallel.pipeline,
        sequence_parallel=plan.sequence_parallel,
        own_regions=True,
        zero=1 if plan.zero1 else 3 if plan.needs_fsdp else 0,
        placement=plan.placement,
        precision="fp8" if plan.float8 and job.precision.fp8 != "emulate" else plan.dtypes.compute,
        gathers_float8=plan.gathers_float8,
        reduction=plan.dtypes.reduction,
        checkpointing=memory.activation_checkpointing,
        checkpointed=1.0 / memory.checkpoint_every,
        keeps_expert_rows=memory.keep_expert_rows,
        selective_exchanges=True,
        offload_activations=memory.offload_activations,
        offload_parameters=memory.offload_parameters,
        offload_optimizer=float(memory.offload_optimizer),
        orthogonalized=plan.orthogonalization,
        updates_in_backward=plan.updates_in_backward,
        kept_every=job.checkpoint.memory_every,
        flash=job.model.attention != "eager",
        masked=plan.masks_rows,
        masks_windows=plan.masks_whole,
        compile=job.model.compile,
        dropout=dropout,
        balanced=parallel.auto_partition,
        rank_blocks=() if parallel.auto_partition else _rank_blocks(plan),
        chunked_loss=plan.chunked_loss,
        reshard_after_forward=parallel.reshard_after_forward,
        whole_in_step=plan.splits_backward,
        trained=facts.trained_parameters / max(1, facts.parameters),
        reference="" if plan.reference == "precomputed" else plan.reference,
        averages=job.training.ema_decay is not None,
        kept_blocks=_last_unit(plan, len(facts.blocks)) if plan.keeps_last_unit else 0,
    )
    if degrees[Axis.EXPERT] == 1:
        return configuration
    # Ranks that are alone on their nodes exchange rows at once, a row for each expert.
    return replace(configuration, copies_on_nodes=ExpertGroups.of(configuration).sharing.local > 1)


def _stack(stack: Stack, dropout: bool) -> Stack:
    """Return the stack of a job; the mask of dropout behind a block's last product is kept, so that this runs again."""
    return replace(stack, stops_early=False) if dropout else stack


def _refuse_gathered_outputs(plan: Plan, facts: ModelFacts) -> None:
    degree = plan.degrees[Axis.TENSOR]
    if (facts.heads_whole or facts.fewest_gathered) and degree > 1:
        raise LegalityError(
            f"parallel.tensor_parallel_degree={degree}: the planner does not know what it takes to gather the outputs "
            "of split layers; use 1 where it is to say a step's time",
            "tensor-without-a-time",
        )


def _rank_blocks(plan: Plan) -> tuple[int, ...]:
    """Return the blocks of each pipeline rank; none without a pipeline."""
    ranks = range(plan.degrees[Axis.PIPELINE] if plan.stages else 0)
    return tuple(sum(len(plan.stages[stage]) for stage in plan.stages_of(rank)) for rank in ranks)


def _last_unit(plan: Plan, blocks: int) -> int:
    """Blocks of what is gathered last in forward: one, or a group of those that are checkpointed together."""
    strategy = plan.job.memory.checkpoint_strategy
    size = blocks if strategy == "contiguous" else group_size(strategy) or 1
    return (blocks - 1) % size + 1 if blocks else 0
