"""Tensor parallelism on plain local tensors (Megatron-LM, arXiv 1909.08053, section 3).

A split module keeps its part of the weight. Two autograd collectives stand at a region's boundary: a column module
needs the whole input, so its input's gradient is summed in backward; a row module makes a partial output, so that is
summed in forward, and its bias is added once, after the sum. Nothing else of the model's code changes: attention sees
fewer heads, and views with -1 adapt to them. Where there are fewer key-value heads than ranks, neighbours hold the same
one for query heads of their own, and its gradient is the sum of theirs. What a model makes for all heads (ALiBi) is cut
at the boundary; what it makes from cut parameters (T5's position biases) is this rank's already. Input embeddings and
head are split by vocabulary where the head runs inside the loss, which then never gathers logits. Stacked experts are
entered with what the router gives them, whose weights have a gradient of every rank's part of an expert to sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from shardwise.collectives.tensor import (
    FeatureParts,
    copy_to_region,
    gather_features,
    reduce_from_region,
)
from shardwise.job.axes import Axis
from shardwise.kernels.linear import linear
from shardwise.kernels.loss import VocabularyShard
from shardwise.model.expert_features import INNER
from shardwise.model.facts import ModelFacts
from shardwise.model.tensor_plan import region_of
from shardwise.model.tensor_split import TensorSplit, chunk
from shardwise.parallel.builder import BuildInputs, ModelBuilder, Transform
from shardwise.parallel.layout import Layout
from shardwise.parallel.mixers import enter_mixer
from shardwise.parallel.regions import RegionBoundary, SequenceRegionBoundary, map_hidden_states
from shardwise.parallel.shared_features import with_shared_features
from shardwise.parallel.tensor_map import Coordinates, ParameterSplit, narrow_parameters
from shardwise.plan.plan import Plan

# Attributes that say how wide a part is: of attention modules that cut a fused projection, and of Conv1D's output.
WIDTHS = ("split_size", "num_heads", "num_attention_heads", "all_head_size", "num_key_value_heads", "num_kv_heads",
          "n_heads")  # fmt: skip
OUTPUTS = ("out_features", "nf")
# Further inputs of a region that are whole activations of another stack.
ENTERING = ("key_value_states", "encoder_hidden_states")

MASK = "attention_mask"  # a model may write biases into it, and then it has a row for each head


def local_heads(values: Any, heads: int, local: slice) -> Any:
    """Return this rank's heads of [B, heads, ...] or [B*heads, 1, S]; what is for all heads stays as it is."""
    if not isinstance(values, Tensor):
        return values
    if values.dim() == 4:
        return values[:, local] if values.shape[1] == heads else values
    return values.unflatten(0, (-1, heads))[:, local].flatten(0, 1) if values.dim() == 3 else values


class TensorParallelism(Transform):
    """Blocks split by heads and inner features, embeddings and head by vocabulary."""

    name = "tensor"
    axis = Axis.TENSOR

    def applies(self, plan: Plan, facts: ModelFacts) -> bool:
        return True

    def apply(self, build: ModelBuilder, inputs: BuildInputs) -> None:
        plan, layout, facts = inputs.plan, inputs.layout, inputs.facts
        for stage in build.stages:
            stage.region_boundary = _region_boundary(plan, layout)
            stage.splits = split_tensors(stage.model, facts, layout, stage.region_boundary)
            split = split_vocabulary(stage.model, facts, layout) if plan.chunked_loss else None
            if split is not None:
                stage.vocabulary = split[0]
                stage.splits |= split[1]


def _region_boundary(plan: Plan, layout: Layout) -> RegionBoundary:
    group = layout.group(Axis.TENSOR)
    return SequenceRegionBoundary(group, layout.index(Axis.TENSOR)) if plan.sequence_parallel else RegionBoundary(group)


def split_tensors(
    model: nn.Module, facts: ModelFacts, layout: Layout, boundary: RegionBoundary
) -> dict[str, ParameterSplit]:
    """Split the modules that the facts name (on the meta device); return parameter name -> how it was split.

    `boundary` says how regions are entered and left.
    """
    splits = facts.splits_beside_experts(layout.expert_degree)
    parameter_splits = planned_splits(model, facts, layout)
    for name, split in splits.items():
        if split.kind in ("partial", "inner"):
            continue
        module = model.get_submodule(name)
        own = [leaf for leaf, _ in module.named_parameters(recurse=False, remove_duplicate=False)]
        narrow_parameters(
            module, {leaf: parameter_splits[key] for leaf in own if (key := f"{name}.{leaf}") in parameter_splits}
        )
        if split.kind in ("mixer", "channels"):
            continue
        if split.kind == "experts":
            _narrow(module, INNER, parameter_splits[f"{name}.down_proj"])
            _enter_routed(module, boundary)
        elif split.kind == "row" and split.inside:
            _sum_inside(module, boundary.group)
        elif split.kind == "row":
            _sum_output(module, split, boundary)
        elif split.kind == "gathered":
            _gather_output(module, split, parameter_splits[f"{name}.weight"], layout)
        else:
            _narrow(module, OUTPUTS, parameter_splits[f"{name}.weight"])
            _make_part(module, split, boundary, layout)
    for region in sorted({region_of(name, split) for name, split in splits.items() if split.kind == "column"}):
        if region in facts.mixers:
            enter_mixer(
                model.get_submodule(region), facts.mixers[region], splits[f"{region}.in_proj"], layout, boundary
            )
        else:
            _enter(model.get_submodule(region), facts, layout, boundary)
    for name in [name for name, split in splits.items() if split.kind == "inner"]:
        parent = name.rpartition(".")[0]
        row = next(
            other for other, split in splits.items() if split.kind == "row" and region_of(other, split) == parent
        )
        model.get_submodule(name).columns = parameter_splits[f"{row}.weight"].columns  # type: ignore[assignment]
    return parameter_splits


def tensor_split(
    shape: tuple[int, ...], dim: int, sections: tuple[int, ...], layout: Coordinates, copies: int = 1, groups: int = 1
) -> ParameterSplit:
    """Return the split over a tensor group.

    `copies` neighbours hold the same part, or `groups` of them share sections.
    """
    first = ParameterSplit(shape, dim, sections, layout.size(Axis.TENSOR) // copies, 0, copies, groups=groups)
    return first.at(layout)


def planned_splits(model: nn.Module, facts: ModelFacts, layout: Coordinates) -> dict[str, ParameterSplit]:
    """Return how `split_tensors` would split the whole `model`, by parameter name; nothing is changed."""
    parameter_splits: dict[str, ParameterSplit] = {}
    for name, split in facts.splits_beside_experts(layout.expert_degree).items():
        if split.kind not in ("partial", "inner"):
            copies = facts.key_value_copies(layout.size(Axis.TENSOR)) if split.key_value else 1
            own = module_splits(model.get_submodule(name), split, layout, copies)
            parameter_splits |= {f"{name}.{leaf}": parameter_split for leaf, parameter_split in own.items()}
    return parameter_splits


def module_splits(module: nn.Module, split: TensorSplit, layout: Coordinates, copies: int) -> dict[str, ParameterSplit]:
    """Return the splits of a module's own parameters, by name, of which `copies` neighbours hold the same part."""
    parameter_splits: dict[str, ParameterSplit] = {}
    for leaf, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        part = split.of(leaf)
        if part is not None:
            sections, groups = part.along(parameter.shape[part.dim], layout.size(Axis.TENSOR))
            parameter_splits[leaf] = tensor_split(tuple(parameter.shape), part.dim, sections, layout, copies, groups)
    return parameter_splits


def _sum_output(module: Any, split: TensorSplit, boundary: RegionBoundary) -> None:
    """Sum a row module's product over the ranks, then add its bias.

    Its weight is [out, in], or [in, out] where `dim` is 0.
    """

    def forward(values: Tensor) -> Tensor:
        total = boundary.region_output(linear(module, values, transposed=split.dim == 0, biased=False))
        return total if module.bias is None else total + module.bias

    module.forward = forward


def _sum_inside(module: Any, group: dist.ProcessGroup) -> None:
    """Sum a row module's product over the ranks, each of which goes on with it for a part of the region."""

    def forward(values: Tensor) -> Tensor:
        total = reduce_from_region(linear(module, values, biased=False), group)
        return copy_to_region(total if module.bias is None else total + module.bias, group)

    module.forward = forward


def _gather_output(module: Any, split: TensorSplit, weight: ParameterSplit, layout: Layout) -> None:
    """Let each rank make its part of a layer's outputs, and put them together; the layer says still how many it has."""
    group, index = layout.group(Axis.TENSOR), layout.index(Axis.TENSOR)
    sizes = tuple(weight.local_shape(rank)[weight.dim] for rank in range(group.size()))
    parts = FeatureParts(group, index, sizes)

    def forward(values: Tensor) -> Tensor:
        part = linear(module, copy_to_region(values, group), transposed=split.dim == 1)
        return gather_features(part, parts)

    module.forward = forward


def _make_part(module: Any, split: TensorSplit, boundary: RegionBoundary, layout: Layout) -> None:
    """Let the boundary compute a column module's product: it knows what backward keeps. Others stay as they are."""
    if not isinstance(module, (nn.Linear, Conv1D)):
        return

    degree = layout.size(Axis.TENSOR)
    sharing = layout.tensor_neighbours(degree // split.groups) if split.shares_groups(degree) else None

    def forward(values: Tensor) -> Tensor:
        part = boundary.linear(module, values, transposed=split.dim == 1)
        behind = sum(split.sizes[len(split.sizes) - split.behind :]) // degree
        return part if sharing is None else with_shared_features(part, split.shared, sharing, behind)

    module.forward = forward  # type: ignore[method-assign]


def _enter_routed(module: Any, boundary: RegionBoundary) -> None:
    """Let what stacked experts are given enter their region, and the sum of their parts leave it.

    The router's weights are often fp32; in fp64 their gradient is summed before it is rounded to that.
    """
    inner: Callable[..., Tensor] = module.forward

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        wide = torch.promote_types(top_k_weights.dtype, hidden_states.dtype)
        index, weights = boundary.routes_input(top_k_index, top_k_weights.to(wide))
        return boundary.region_output(inner(boundary.region_input(hidden_states), index, weights))

    module.forward = forward


def _narrow(module: Any, names: Sequence[str], parameter_split: ParameterSplit) -> None:
    for name in names:
        if hasattr(module, name):
            setattr(module, name, parameter_split.local_shape()[parameter_split.dim])


def _enter(region: Any, facts: ModelFacts, layout: Layout, boundary: RegionBoundary) -> None:
    """Let a region's activations enter by its boundary; tell the region how wide its part is."""
    inner: Callable[..., Any] = region.forward
    degree, index, heads = layout.size(Axis.TENSOR), layout.index(Axis.TENSOR), facts.attention_heads
    local = slice(index * heads // degree, (index + 1) * heads // degree)
    per_head = (MASK, *facts.per_head_arguments)

    def forward(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = map_hidden_states(boundary.region_input, args, kwargs)
        kwargs |= {name: boundary.region_input(kwargs[name]) for name in ENTERING if kwargs.get(name) is not None}
        kwargs |= {name: local_heads(kwargs[name], heads, local) for name in per_head if name in kwargs}
        return inner(*args, **kwargs)

    region.forward = forward
    for name in WIDTHS:
        if isinstance(getattr(region, name, None), int):
            setattr(region, name, max(1, getattr(region, name) // degree))  # 1: a key-value head that others hold too
    if isinstance(getattr(region, "num_key_value_groups", None), int):  # query heads of each key-value head
        region.num_key_value_groups //= facts.key_value_copies(degree)


def split_vocabulary(
    model: Any, facts: ModelFacts, layout: Layout
) -> tuple[VocabularyShard, dict[str, ParameterSplit]] | None:
    """Split input embeddings and head (on the meta device) by rows of the vocabulary; None where they are not plain."""
    if not facts.vocabulary_parameters:
        return None
    head = model.get_submodule(facts.head)
    parts: list[nn.Parameter] = []
    parameter_splits: dict[str, ParameterSplit] = {}
    for parameter in [model.get_parameter(name) for name in facts.vocabulary_parameters]:
        shape = tuple(parameter.shape)
        parameter_split = tensor_split(shape, 0, shape[:1], layout)
        local = nn.Parameter(parameter.new_empty(parameter_split.local_shape()), requires_grad=parameter.requires_grad)
        parts.append(local)
        for name, owner in model.named_modules():
            own = owner.named_parameters(recurse=False, remove_duplicate=False)
            for leaf in [leaf for leaf, candidate in own if candidate is parameter]:
                owner.register_parameter(leaf, local)  # under all its names: a tie stays one parameter
                parameter_splits[f"{name}.{leaf}"] = parameter_split
    parameter_split = parameter_splits[f"{facts.head}.weight"]
    rows = chunk(parameter_split.shape[0], parameter_split.degree, parameter_split.index)
    vocabulary = VocabularyShard(layout.group(Axis.TENSOR), rows.start, rows.stop)
    for table in [table for table in model.modules() if isinstance(table, nn.Embedding)]:
        # T5's stacks each have a module of their own for it, and a decoder one that the head is tied to.
        if any(table.weight is part for part in parts):
            _look_up_part(table, vocabulary)
    _gather_logits(head, parameter_split, vocabulary.group)
    return vocabulary, parameter_splits


def _look_up_part(embedding: Any, vocabulary: VocabularyShard) -> None:
    """Let each rank look up the ids that it holds; the sum over the ranks has each once."""
    pad = embedding.padding_idx
    pad = pad - vocabulary.first if pad is not None and vocabulary.first <= pad < vocabulary.end else None

    def forward(ids: Tensor) -> Tensor:
        elsewhere = (ids < vocabulary.first) | (ids >= vocabulary.end)
        rows = F.embedding((ids - vocabulary.first).masked_fill(elsewhere, 0), embedding.weight, pad)
        return reduce_from_region(rows.masked_fill(elsewhere.unsqueeze(-1), 0.0), vocabulary.group)

    embedding.forward = forward


def _gather_logits(head: Any, split: ParameterSplit, group: dist.ProcessGroup) -> None:
    """Let the head give whole logits, for generation and a loss of the user's own; others take the loss of parts."""
    sizes = [split.local_shape(index)[0] for index in range(group.size())]
    before, after = sum(sizes[: split.index]), sum(sizes[split.index + 1 :])

    def forward(hidden: Tensor) -> Tensor:
        part = F.linear(copy_to_region(hidden, group), head.weight, head.bias)
        return reduce_from_region(F.pad(part, (before, after)), group)

    head.forward = forward
