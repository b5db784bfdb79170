"""Low-rank adapters on linear layers and stacks of experts of this rank's blocks (kernels/adapters.py), split as these
are."""

from __future__ import annotations

from typing import Any

from torch import nn

from shardwise.job.axes import Axis
from shardwise.kernels.adapters import LowRankProduct, StackUpdate, add_adapter_weights
from shardwise.kernels.linear import use_adapter
from shardwise.kernels.precision import torch_dtype
from shardwise.model.adapters import (
    LORA_A,
    LORA_B,
    MAGNITUDE,
    STACK_ADAPTERS,
    adapted_parameter,
    adapter_shapes,
    adapter_split,
)
from shardwise.model.facts import LayerAdapter, ModelFacts
from shardwise.parallel.builder import BuildInputs, ModelBuilder, StageBuilder, Transform
from shardwise.parallel.tensor_map import ParameterSplit, narrow_parameters
from shardwise.parallel.transforms.tensor import module_splits
from shardwise.plan.plan import Plan


class LowRankAdapters(Transform):
    """Adapters beside the layers that the facts name; of layers that tensor ranks share, this rank's part of them."""

    name = "adapters"

    def applies(self, plan: Plan, facts: ModelFacts) -> bool:
        return bool(facts.adapters)

    def apply(self, build: ModelBuilder, inputs: BuildInputs) -> None:
        is_split = max(inputs.plan.degrees[Axis.TENSOR], inputs.plan.degrees[Axis.EXPERT]) > 1
        for stage in build.stages:
            for name, adapter in inputs.facts.adapters.items():
                splits = planned_adapter_splits(name, adapter, inputs) if is_split else {}
                stage.splits |= splits  # of layers on other stages too: the map of all stages reads one of them
                if not stage.holds(inputs.facts.block_of[adapted_parameter(name, adapter)]):
                    continue
                if adapter.experts:
                    _adapt_stack(stage, name, adapter, splits, inputs)
                else:
                    _adapt(stage, name, adapter, splits, inputs)


def planned_adapter_splits(name: str, adapter: LayerAdapter, inputs: BuildInputs) -> dict[str, ParameterSplit]:
    """Return how ranks split the parameters of the adapter of layer `name`, by parameter name."""
    facts, layout = inputs.facts, inputs.layout
    if adapter.experts and layout.expert_degree > 1:
        ranks = layout.experts.degree, layout.experts.expert
        return {
            key: ParameterSplit(shape, 0, (adapter.experts,), *ranks, axis=Axis.EXPERT)
            for key, shape in adapter_shapes(name, adapter).items()
        }
    if layout.size(Axis.TENSOR) == 1:
        return {}
    layer = nn.Module()
    add_adapter_weights(layer, adapter, torch_dtype(inputs.plan.dtypes.parameters))
    splits: dict[str, ParameterSplit] = {}
    for owner, weights in layer.named_children():
        split = adapter_split(facts, f"{name}.{owner}")
        if split is not None:
            copies = facts.key_value_copies(layout.size(Axis.TENSOR)) if split.key_value else 1
            own = module_splits(weights, split, layout, copies)
            splits |= {f"{name}.{owner}.{leaf}": part for leaf, part in own.items()}
    return splits


def _adapt(
    stage: StageBuilder, name: str, adapter: LayerAdapter, splits: dict[str, ParameterSplit], inputs: BuildInputs
) -> None:
    """Give a layer of the stage its adapter."""
    layer: Any = stage.model.get_submodule(name)
    _add_parts(layer, name, adapter, splits, inputs)
    layer.lora_dropout = _dropout(name, adapter, splits, inputs)
    is_row = f"{name}.{LORA_A}.weight" in splits
    group = inputs.layout.group(Axis.TENSOR) if is_row else None
    use_adapter(layer, LowRankProduct(layer, adapter.scaling, adapter.transposed, group))


def _adapt_stack(
    stage: StageBuilder, name: str, adapter: LayerAdapter, splits: dict[str, ParameterSplit], inputs: BuildInputs
) -> None:
    """Give a stack of experts of the stage its adapters."""
    module, _, leaf = name.partition(f".{STACK_ADAPTERS}.")
    experts: Any = stage.model.get_submodule(module)
    if not hasattr(experts, STACK_ADAPTERS):
        experts.add_module(STACK_ADAPTERS, nn.ModuleDict())
        experts.adapter = StackUpdate(experts, {})
        experts.forward = experts.adapter.run
    owner = nn.Module()
    experts.stack_adapters[leaf] = owner
    experts.adapter.scalings[leaf] = adapter.scaling
    _add_parts(owner, name, adapter, splits, inputs)


def _add_parts(
    layer: nn.Module, name: str, adapter: LayerAdapter, splits: dict[str, ParameterSplit], inputs: BuildInputs
) -> None:
    """Give `layer` this rank's parts of the parameters of the adapter `name`."""
    add_adapter_weights(layer, adapter, torch_dtype(inputs.plan.dtypes.parameters))
    for owner in (LORA_A, LORA_B, MAGNITUDE):
        key = f"{name}.{owner}.weight"
        if key in splits:
            narrow_parameters(layer.get_submodule(owner), {"weight": splits[key]})


def _dropout(name: str, adapter: LayerAdapter, splits: dict[str, ParameterSplit], inputs: BuildInputs) -> nn.Module:
    """Return dropout of the adapter's input, which says what of the features and positions is here, if not all."""
    dropout: Any = nn.Dropout(adapter.dropout)
    split = inputs.facts.tensor_splits.get(name)
    if f"{name}.{LORA_A}.weight" in splits:
        dropout.columns = splits[f"{name}.{LORA_A}.weight"].columns
    elif splits or (split is not None and split.kind == "partial"):
        dropout.columns = 0, adapter.inputs  # a region: all positions are here
    return dropout
