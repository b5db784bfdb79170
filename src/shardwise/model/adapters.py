"""Adapters of a job: which layers of a model have one, what parameters they bring, and how tensor ranks split these.

Plain data; the arithmetic is in kernels/adapters.py. Names of parameters are those of peft's files without its prefix:
`LAYER.lora_A.weight` [rank, inputs], `LAYER.lora_B.weight` [outputs, rank] and, for DoRA, the lengths of the weight's
rows, `LAYER.lora_magnitude_vector.weight` [outputs]. How names are matched is peft's rule, so that a config means the
same here and there.

A stack of experts W [experts, outputs, inputs], the parameter `EXPERTS.STACK`, has an adapter for each expert: `LAYER`
is then `EXPERTS.stack_adapters.STACK`, A is [experts, rank, inputs] and B [experts, outputs, rank].
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from shardwise.job.schema import AdapterSection
from shardwise.model.facts import BlockFacts, LayerAdapter, ModelFacts
from shardwise.model.tensor_split import LINEAR_KINDS, TensorSplit

Number = TypeVar("Number", int, float)
ALL_LINEAR = "all-linear"
STACK_ADAPTERS = "stack_adapters"  # child of a module of experts, with a child for each stack that has adapters
LORA_A, LORA_B, MAGNITUDE = "lora_A", "lora_B", "lora_magnitude_vector"


def with_adapters(facts: ModelFacts, settings: AdapterSection) -> ModelFacts:
    """Return `facts` with the adapters that `settings` ask for: their parameters are trained, and nothing else.

    What `settings` name and the model lacks is left out; the rules say so.
    """
    if settings.kind == "none":
        return facts
    adapters = adapted_layers(facts, settings) | adapted_stacks(facts, settings)
    added = {layer: adapter_shapes(layer, adapter) for layer, adapter in adapters.items()}
    sizes = {layer: sum(map(math.prod, own.values())) for layer, own in added.items()}
    return replace(
        facts,
        adapters=adapters,
        parameter_shapes=_behind_their_layers(facts.parameter_shapes, added),
        parameters=facts.parameters + sum(sizes.values()),
        blocks=tuple(_with_size(block, sizes) for block in facts.blocks),
        frozen=facts.frozen | (facts.parameter_shapes.keys() - set(saved_parameters(facts, settings.modules_to_save))),
    )


def adapted_layers(facts: ModelFacts, settings: AdapterSection) -> dict[str, LayerAdapter]:
    """Return the linear layers of the blocks that `settings` target, with their adapters."""
    adapters = {}
    for layer, (inputs, outputs) in facts.linears.items():
        if not is_target(layer, settings.target_modules) or is_saved(f"{layer}.weight", settings.modules_to_save):
            continue
        rank = by_pattern(settings.rank_pattern, layer, settings.rank)
        alpha = by_pattern(settings.alpha_pattern, layer, settings.alpha)
        scaling = alpha / (math.sqrt(rank) if settings.rslora else rank)
        adapters[layer] = LayerAdapter(
            rank,
            scaling,
            settings.dropout,
            inputs,
            outputs,
            transposed=layer in facts.transposed_linears,
            has_magnitude=settings.kind == "dora",
        )
    return adapters


def adapted_stacks(facts: ModelFacts, settings: AdapterSection) -> dict[str, LayerAdapter]:
    """Return the adapters of the stacks of experts that `settings` target, by the names of their owners."""
    adapters = {}
    for stack in facts.expert_matrices:
        module, _, leaf = stack.rpartition(".")
        if not any(is_named(stack, name) for name in settings.target_parameters):
            continue
        if is_saved(stack, settings.modules_to_save):
            continue
        experts, outputs, inputs = facts.parameter_shapes[stack]
        rank = by_pattern(settings.rank_pattern, stack, settings.rank)
        alpha = by_pattern(settings.alpha_pattern, stack, settings.alpha)
        scaling = alpha / (math.sqrt(rank) if settings.rslora else rank)
        adapters[f"{module}.{STACK_ADAPTERS}.{leaf}"] = LayerAdapter(
            rank, scaling, 0.0, inputs, outputs, experts=experts
        )
    return adapters


def adapted_parameter(layer: str, adapter: LayerAdapter) -> str:
    """Return the name of the weight that an adapter changes."""
    return layer.replace(f".{STACK_ADAPTERS}.", ".") if adapter.experts else f"{layer}.weight"


def is_target(layer: str, targets: str | Sequence[str]) -> bool:
    """Return True if `targets` (all-linear, a regular expression, or names) mean the linear layer."""
    if isinstance(targets, str):
        return targets == ALL_LINEAR or re.fullmatch(targets, layer) is not None
    return any(is_named(layer, name) for name in targets)


def is_named(module: str, name: str) -> bool:
    """Return True if `name` is the module's, or the end of it."""
    return module == name or module.endswith(f".{name}")


def by_pattern(patterns: Mapping[str, Number], layer: str, default: Number) -> Number:
    """Return the value of the first pattern that matches the layer's name, or the end of it."""
    return next((value for pattern, value in patterns.items() if matches_end(pattern, layer)), default)


def matches_end(pattern: str, layer: str) -> bool:
    """Return True if the regular expression matches the layer's name, or the end of it behind a dot."""
    return re.match(rf"(.*\.)?({pattern})$", layer) is not None


def saved_parameters(facts: ModelFacts, modules: Sequence[str]) -> list[str]:
    """Return the parameters of the `modules` that are trained whole."""
    return [name for name in facts.base_shapes if is_saved(name, modules)]


def is_saved(parameter: str, modules: Iterable[str]) -> bool:
    """Return True if a module whose name ends with one of `modules` holds the parameter, itself or below.

    As in peft an end may begin within a part of the name: `norm` is `model.norm` and each `input_layernorm`.
    """
    owners = [parameter[:index] for index, mark in enumerate(parameter) if mark == "."]
    return any(owner.endswith(module) for owner in owners for module in modules)


def is_adapter(parameter: str, layers: Container[str]) -> bool:
    """Return True if the parameter belongs to the adapter of one of `layers`."""
    layer, _, owner = parameter.removesuffix(".weight").rpartition(".")
    return layer in layers and owner in (LORA_A, LORA_B, MAGNITUDE)


def adapter_shapes(layer: str, adapter: LayerAdapter) -> dict[str, tuple[int, ...]]:
    """Return the shapes of an adapter's parameters, by name."""
    stack = (adapter.experts,) if adapter.experts else ()
    shapes: dict[str, tuple[int, ...]] = {
        f"{layer}.{LORA_A}.weight": (*stack, adapter.rank, adapter.inputs),
        f"{layer}.{LORA_B}.weight": (*stack, adapter.outputs, adapter.rank),
    }
    return shapes | ({f"{layer}.{MAGNITUDE}.weight": (adapter.outputs,)} if adapter.has_magnitude else {})


def adapter_split(facts: ModelFacts, owner: str) -> TensorSplit | None:
    """Return how tensor ranks split the parameter of `owner`, such as LAYER.lora_B; None where each holds it whole.

    B and magnitude are split as the output features of a layer are, a row layer's A as its input features.
    """
    layer, _, kind = owner.rpartition(".")
    split = _layer_split(facts, layer) if layer in facts.adapters else None
    if split is None or split.kind not in LINEAR_KINDS or (kind == LORA_A) != (split.kind == "row"):
        return None
    stacked = 1 if facts.adapters[layer].experts else 0
    return replace(split, dim=stacked + (1 if kind == LORA_A else 0))


def _layer_split(facts: ModelFacts, layer: str) -> TensorSplit | None:
    """Return how tensor ranks split the layer of an adapter, or each expert of its stack."""
    module, is_stack, leaf = layer.partition(f".{STACK_ADAPTERS}.")
    split = facts.tensor_splits.get(module)
    return split.of(leaf) if split is not None and is_stack else split


def partial_adapters(facts: ModelFacts) -> list[str]:
    """Return the owners of whole parameters that see a part of the activations, or of the gradient, on a tensor rank.

    Those are a column layer's A, whose gradient comes through B's parts, and a row layer's B and magnitude.
    """
    owners = {"column": (LORA_A,), "gathered": (LORA_A,), "row": (LORA_B, MAGNITUDE)}
    splits = {layer: _layer_split(facts, layer) for layer in facts.adapters}
    kinds = {layer: split.kind for layer, split in splits.items() if split is not None}
    return [f"{layer}.{owner}" for layer, kind in kinds.items() for owner in owners.get(kind, ())]


def _behind_their_layers(
    shapes: Mapping[str, tuple[int, ...]], added: Mapping[str, Mapping[str, tuple[int, ...]]]
) -> dict[str, tuple[int, ...]]:
    """Return all shapes in module order: an adapter's follow the last parameter of its layer, or of its experts."""
    last = {name.rpartition(".")[0]: name for name in shapes}
    behind: dict[str, dict[str, tuple[int, ...]]] = {}
    for layer, own in added.items():
        behind.setdefault(layer.partition(f".{STACK_ADAPTERS}.")[0], {}).update(own)
    ordered: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        ordered[name] = shape
        module = name.rpartition(".")[0]
        if last[module] == name:
            ordered |= behind.get(module, {})
    return ordered


def _with_size(block: BlockFacts, sizes: Mapping[str, int]) -> BlockFacts:
    added = sum(size for layer, size in sizes.items() if layer.startswith(f"{block.name}."))
    return replace(block, parameters=block.parameters + added)
