"""Frozen weights of linear layers in 4 or 8 bits (kernels/packed_weights.py), sharded and split as they were."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shardwise.kernels.linear import use_packing
from shardwise.model.facts import ModelFacts
from shardwise.model.packed_weights import BLOCK, packed_shape
from shardwise.parallel.builder import BuildInputs, ModelBuilder, StageBuilder, Transform
from shardwise.parallel.tensor_map import ParameterSplit
from shardwise.plan.plan import Plan


class PackedBase(Transform):
    """Packed weights in the place of those that the facts name; what tensor ranks share, in whole blocks."""

    name = "packed_base"

    def applies(self, plan: Plan, facts: ModelFacts) -> bool:
        return bool(facts.packed)

    def apply(self, build: ModelBuilder, inputs: BuildInputs) -> None:
        for stage in build.stages:
            for name, form in inputs.facts.packed.items():
                if name in stage.splits:  # of layers on other stages too: the map of all stages reads one of them
                    stage.splits[name] = packed_split(stage.splits[name], form)
                if stage.holds(inputs.facts.block_of[name]):
                    _pack(stage, name, form)


def packed_split(split: ParameterSplit, form: str) -> ParameterSplit:
    """Return how ranks split the packed form of a weight that they split so."""
    is_last = split.dim == len(split.shape) - 1
    sections = tuple(section // BLOCK for section in split.sections) if is_last else split.sections
    return replace(split, shape=packed_shape(split.shape, form), sections=sections)


def _pack(stage: StageBuilder, name: str, form: str) -> None:
    """Give a layer of the stage, on the meta device, the packed form of its weight."""
    layer: Any = stage.model.get_submodule(name.removesuffix(".weight"))
    packed = torch.empty(packed_shape(layer.weight.shape, form), dtype=torch.int8, device=layer.weight.device)
    layer.weight = nn.Parameter(packed, requires_grad=False)
    use_packing(layer, form)
