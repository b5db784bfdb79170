"""parallelize(): one fixed order in which a model on the meta device becomes this rank's part of it.

Read this file and training/step.py and you have seen the whole of distributed training.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.job.axes import Axis
from shardwise.kernels.dropout import name_functional_dropout, replace_dropout
from shardwise.kernels.float8 import Float8
from shardwise.kernels.liger import use_liger
from shardwise.kernels.linear import defer_weight_gradients, use_float8
from shardwise.kernels.loss import Vocabulary
from shardwise.kernels.precision import torch_dtype
from shardwise.model.facts import ModelFacts
from shardwise.parallel.layout import Layout
from shardwise.parallel.model import DeferredHead, Joined, ParallelModel, Part
from shardwise.parallel.pipeline import Pipeline
from shardwise.parallel.tensor_map import Cut, TensorMap
from shardwise.parallel.transforms.attention import lead_attention
from shardwise.parallel.transforms.checkpointing import apply_activation_checkpointing, group_blocks
from shardwise.parallel.transforms.context import Context
from shardwise.parallel.transforms.offload import ActivationOffload
from shardwise.parallel.transforms.sequence import ScatteredRows, WholeRows, scatter_between
from shardwise.parallel.transforms.sharding import materialize, shard
from shardwise.parallel.transforms.stages import Passage, Sizes, cut_stage, join_ends
from shardwise.parallel.transforms.tensor import partial_parameters, split_tensors, split_vocabulary
from shardwise.parallel.transforms.traced_stages import Tracer, cut_traced
from shardwise.plan.plan import Plan
from shardwise.planner.formulas.schedule import tied_across

Allocation = Callable[[], AbstractContextManager[Any]]  # surrounds what gives tensors their storage


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
        allocation: in which parameters and buffers get their storage; a dry run's gives them none.
    """
    device = device or torch.device(plan.world.device_type)
    _to_dtypes(model, plan)
    stages = plan.stages_of(layout.index(Axis.PIPELINE))
    flat = bool(stages) and facts.stages.travels_flat and not facts.stages.traced
    sizes = Sizes(model, facts, plan) if flat else None  # of attention as it is: kernels look into masks
    if plan.attention:
        lead_attention(model, plan.attention)
    context = Context(model, plan, layout) if layout.size(Axis.CONTEXT) > 1 else None
    models = [model, *(copy.deepcopy(model) for _ in stages[1:])]
    if plan.job.model.liger:
        for each in models:
            use_liger(each, facts.fusible)
    splits = [_split(each, plan, layout, facts) for each in models]
    tracer = Tracer(model, facts, plan, device) if stages and facts.stages.traced else None
    passages = [
        cut_traced(each, tracer, stage) if tracer else cut_stage(each, facts, plan, stage, device, sizes)
        for each, stage in zip(models, stages)
    ]
    together = join_ends(models)
    parts = [
        _part(each, plan, facts, device, split, passage)
        for each, split, passage in zip_longest(models, splits, passages)
    ]
    for joined in [parts] if together else [[part] for part in parts]:
        _store(joined, plan, layout, device, allocation)
    cuts = splits[0].cuts
    tied = tied_across(plan, facts)
    for ranks in dict.fromkeys(tied.values()):
        layout.holders_group(ranks)  # here, where every rank is, for a group is made by all
    tensor_map = TensorMap.of(models, layout, cuts, tied)
    partial = partial_parameters(tensor_map, facts, layout, plan.sequence_parallel) if cuts else ()
    hidden = facts.stages.hidden or (plan.positions, facts.hidden_size)
    pipeline = Pipeline(plan, layout, passages, hidden, device) if passages else None
    tied = {name: ranks for name, ranks in tied.items() if name in tensor_map.names}
    return ParallelModel(parts, plan, layout, facts, tensor_map, device, partial, tied, pipeline, context)


def _to_dtypes(model: nn.Module, plan: Plan) -> None:
    """Parameters, and buffers with them: but those that are in the dtype of computing already stay in it.

    A module that its author has halved computes with halves of its buffers too; wider ones would widen activations.
    """
    compute = torch_dtype(plan.dtypes.compute)
    halved = [(held, leaf, buffer) for held, leaf, buffer in _buffers(model) if buffer.dtype == compute]
    model.to(torch_dtype(plan.dtypes.parameters))
    for held, leaf, buffer in halved:
        held[leaf] = buffer


def _buffers(model: nn.Module) -> list[tuple[dict[str, Tensor | None], str, Tensor]]:
    """(where it is held, name there, buffer)."""
    held = [module._buffers for module in model.modules()]
    return [(names, leaf, buffer) for names in held for leaf, buffer in names.items() if buffer is not None]


def _part(
    model: nn.Module, plan: Plan, facts: ModelFacts, device: torch.device, split: _Split, passage: Passage | None
) -> Part:
    """The order below tensors and stages, down to what is sharded."""
    memory = plan.job.memory
    absent = () if passage is None else passage.absent
    names = [block.name for block in facts.blocks if block.name not in absent and not facts.stages.traced]
    blocks, inside = [model.get_submodule(name) for name in names], tuple(f"{name}." for name in names)
    groups = group_blocks(blocks, memory.checkpoint_strategy)
    replace_dropout(model)
    if facts.has_functional_dropout or (plan.attention and facts.has_attention_dropout):
        counting = [name for name in facts.counting if name not in absent and not facts.stages.traced]
        name_functional_dropout([model.get_submodule(name) for name in counting], counting)
    has_head = passage is None or passage.is_last
    head = None
    if plan.chunked_loss and facts.head and has_head:
        head = DeferredHead(model.get_submodule(facts.head), split.vocabulary)
    if plan.float8:
        here = [model.get_submodule(name) for name in plan.float8 if name.startswith(inside)]
        use_float8(here, Float8(plan.job.precision.fp8, plan.job.precision.fp8_scaling, plan.gathers_float8))
    later = defer_weight_gradients(blocks) if plan.splits_backward else None
    if plan.job.model.compile:
        _compile(blocks, plan.job.model.cuda_graphs)
    if memory.activation_checkpointing != "none":
        horizon = memory.activation_loading_horizon
        offload = ActivationOffload(device, horizon) if memory.offload_activations else None
        apply_activation_checkpointing(groups, memory, offload)
    if isinstance(split.border, ScatteredRows):
        scatter_between(blocks, split.border)
    return Part(model, head, groups, passage, later)


def _store(parts: Sequence[Part], plan: Plan, layout: Layout, device: torch.device, allocation: Allocation) -> None:
    """Shard parts under one root and give them storage."""
    root: nn.Module = parts[0].module
    if len(parts) > 1:
        root = Joined(part.module for part in parts)
    groups = [group for part in parts for group in part.groups]
    sharded = shard(root, groups, plan, layout) if plan.needs_fsdp else []
    for number, part in enumerate(parts):
        part.sharded, part.call = sharded, partial(root, number) if len(parts) > 1 else None
    with allocation():
        materialize(root, device, torch.device("cpu") if plan.job.memory.offload_parameters else device)


class _Split(NamedTuple):
    """What tensor parallelism did to a model."""

    cuts: dict[str, Cut]
    vocabulary: Vocabulary | None = None  # this rank's rows, where embeddings and head are split
    border: WholeRows | None = None  # how regions are entered and left


def _split(model: nn.Module, plan: Plan, layout: Layout, facts: ModelFacts) -> _Split:
    """Tensor parallelism: blocks by heads and inner features, embeddings and head by vocabulary."""
    if layout.size(Axis.TENSOR) == 1:
        return _Split({})
    group = layout.group(Axis.TENSOR)
    border = ScatteredRows(group, layout.index(Axis.TENSOR)) if plan.sequence_parallel else WholeRows(group)
    cuts = split_tensors(model, facts, layout, border)
    by_rows = split_vocabulary(model, facts, layout) if plan.chunked_loss else None
    vocabulary, rows = by_rows or (None, {})
    return _Split(cuts | rows, vocabulary, border)


def _compile(blocks: Sequence[nn.Module], graphs: bool) -> None:
    """Compile each block's forward, below checkpointing and FSDP2's hooks, which then see one opaque region."""
    mode = "reduce-overhead" if graphs else None  # torch's name for a compiled region in CUDA graphs
    for block in blocks:
        block.forward = torch.compile(block.forward, mode=mode)  # type: ignore[method-assign]
