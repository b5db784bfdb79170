"""parallelize(): one fixed order in which a model on the meta device becomes this rank's part of it.

Read this file and training/step.py and you have seen the whole of distributed training.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from shardwise.families.facts import ModelFacts
from shardwise.kernels.dropout import name_functional_dropout, replace_dropout
from shardwise.kernels.loss import Vocabulary
from shardwise.layout import Layout
from shardwise.memory.activation_checkpointing import apply_activation_checkpointing, group_blocks
from shardwise.memory.offload import ActivationOffload
from shardwise.parallel.model import DeferredHead, ParallelModel
from shardwise.parallel.sequence import ScatteredRows, WholeRows, scatter_between
from shardwise.parallel.sharded import materialize, shard
from shardwise.parallel.tensor import partial_parameters, split_tensors, split_vocabulary
from shardwise.parallel.tensor_map import Cut, TensorMap
from shardwise.plan import Plan
from shardwise.precision import torch_dtype


def parallelize(
    model: nn.Module, plan: Plan, layout: Layout, facts: ModelFacts, device: torch.device | None = None
) -> ParallelModel:
    """Make `model` (on the meta device) this rank's part of the job; weights are uninitialized until `initialize`.

    Args:
        model: the unmodified model; it is changed in place.
        plan: what will run.
        layout: where this rank stands.
        facts: the model's structure.
        device: where this rank computes; unset: the CPU or the current CUDA device.
    """
    memory = plan.job.memory
    device = device or torch.device(plan.world.device_type)
    blocks = [model.get_submodule(block.name) for block in facts.blocks]
    groups = group_blocks(blocks, memory.checkpoint_strategy)

    model.to(torch_dtype(plan.dtypes.parameters))
    border = _border(plan, layout)
    vocabulary, cuts = _split(model, plan, layout, facts, border) if border else (None, {})
    replace_dropout(model)
    if facts.has_functional_dropout:
        name_functional_dropout(blocks, [block.name for block in facts.blocks])
    head = DeferredHead(model.get_submodule(facts.head), vocabulary) if plan.chunked_loss and facts.head else None
    if plan.job.model.compile:
        _compile(blocks)
    if memory.activation_checkpointing != "none":
        horizon = memory.activation_loading_horizon
        offload = ActivationOffload(device, horizon) if memory.offload_activations else None
        apply_activation_checkpointing(groups, memory, offload)
    if isinstance(border, ScatteredRows):
        scatter_between(blocks, border)
    sharded = shard(model, groups, plan, layout) if plan.needs_fsdp else []
    materialize(model, device, torch.device("cpu") if memory.offload_parameters else device)
    tensor_map = TensorMap.of(model, layout, cuts)
    partial = partial_parameters(tensor_map, facts, layout, plan.sequence_parallel) if cuts else ()
    return ParallelModel(model, plan, layout, facts, tensor_map, device, head, sharded, partial)


def _border(plan: Plan, layout: Layout) -> WholeRows | None:
    """How the regions of tensor parallelism are entered and left; None where no tensor is split."""
    if layout.size("tensor") == 1:
        return None
    group = layout.group("tensor")
    return ScatteredRows(group, layout.index("tensor")) if plan.sequence_parallel else WholeRows(group)


def _split(
    model: nn.Module, plan: Plan, layout: Layout, facts: ModelFacts, border: WholeRows
) -> tuple[Vocabulary | None, dict[str, Cut]]:
    """Tensor parallelism: blocks by heads and inner features, embeddings and head by vocabulary."""
    cuts = split_tensors(model, facts, layout, border)
    by_rows = split_vocabulary(model, facts, layout) if plan.chunked_loss else None
    return (None, cuts) if by_rows is None else (by_rows[0], cuts | by_rows[1])


def _compile(blocks: Sequence[nn.Module]) -> None:
    """Compile each block's forward, below checkpointing and FSDP2's hooks, which then see one opaque region."""
    for block in blocks:
        block.forward = torch.compile(block.forward)  # type: ignore[method-assign]
