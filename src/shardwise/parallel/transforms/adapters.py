"""Low-rank adapters on the linear layers of this rank's blocks (kernels/adapters.py), split as their layers are."""

from __future__ import annotations

from typing import Any

from torch import nn

from shardwise.job.axes import Axis
from shardwise.kernels.adapters import LowRankProduct, add_adapter_weights
from shardwise.kernels.linear import use_adapter
from shardwise.kernels.precision import torch_dtype
from shardwise.model.adapters import LORA_A, LORA_B, MAGNITUDE, adapter_split
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
        is_split = inputs.plan.degrees[Axis.TENSOR] > 1
        for stage in build.stages:
            for name, adapter in inputs.facts.adapters.items():
                splits = planned_adapter_splits(name, adapter, inputs) if is_split else {}
                stage.splits |= splits  # of layers on other stages too: the map of all stages reads one of them
                if stage.holds(inputs.facts.block_of[f"{name}.weight"]):
                    _adapt(stage, name, adapter, splits, inputs)


def planned_adapter_splits(name: str, adapter: LayerAdapter, inputs: BuildInputs) -> dict[str, ParameterSplit]:
    """Return how tensor ranks split the parameters of the adapter of layer `name`, by parameter name."""
    facts, layout = inputs.facts, inputs.layout
    layer = nn.Linear(adapter.inputs, adapter.outputs, bias=False, device="meta")
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
    add_adapter_weights(layer, adapter, torch_dtype(inputs.plan.dtypes.parameters))
    for owner in (LORA_A, LORA_B, MAGNITUDE):
        key = f"{name}.{owner}.weight"
        if key in splits:
            narrow_parameters(layer.get_submodule(owner), {"weight": splits[key]})
    layer.lora_dropout = _dropout(name, adapter, splits, inputs)
    is_row = f"{name}.{LORA_A}.weight" in splits
    group = inputs.layout.group(Axis.TENSOR) if is_row else None
    use_adapter(layer, LowRankProduct(layer, adapter.scaling, adapter.transposed, group))


def _dropout(name: str, adapter: LayerAdapter, splits: dict[str, ParameterSplit], inputs: BuildInputs) -> nn.Module:
    """Return dropout of the adapter's input, which says what of the features and positions is here, if not all."""
    dropout: Any = nn.Dropout(adapter.dropout)
    split = inputs.facts.tensor_splits.get(name)
    if f"{name}.{LORA_A}.weight" in splits:
        dropout.columns = splits[f"{name}.{LORA_A}.weight"].columns
    elif splits or (split is not None and split.kind == "partial"):
        dropout.columns = 0, adapter.inputs  # a region: all positions are here
    return dropout
