"""Adapters merged into the weights of their layers, as a stream of whole tensors: what they computed, in one matrix."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from shardwise.errors import CheckpointError
from shardwise.model.adapters import LORA_A, LORA_B, MAGNITUDE, adapted_parameter, adapter_shapes
from shardwise.model.facts import LayerAdapter
from shardwise.words import listed

WEIGHT = "weight"  # the part of an adapted layer that is the model's own


def merged(
    tensors: Iterable[tuple[str, Tensor]], adapters: Mapping[str, LayerAdapter], wide: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yield `tensors` by name with `adapters` merged; an adapter follows its layer, whose weight is held until then.

    A merged weight is rounded to the dtype of the layer's own, unless `wide`: then it is in fp32 or wider.

    Raises:
        CheckpointError: a part of a layer, or of its adapter, is not among them.
    """
    waiting: dict[str, dict[str, Tensor]] = {}
    layers = {adapted_parameter(layer, adapter): layer for layer, adapter in adapters.items()}
    for name, tensor in tensors:
        layer, part = (layers[name], WEIGHT) if name in layers else _split(name, adapters)
        if not layer:
            yield name, tensor
            continue
        parts = waiting.setdefault(layer, {})
        parts[part] = tensor
        if len(parts) == 1 + len(adapter_shapes(layer, adapters[layer])):
            adapter = adapters[layer]
            yield adapted_parameter(layer, adapter), merged_weight(waiting.pop(layer), adapter, wide)
    if waiting:
        layer, parts = next(iter(waiting.items()))
        raise CheckpointError(
            f"{layer} cannot be merged: of it and its adapter there is {listed(sorted(parts))} alone; the checkpoint "
            "lacks the rest"
        )


@torch.no_grad()
def merged_weight(parts: Mapping[str, Tensor], adapter: LayerAdapter, wide: bool = False) -> Tensor:
    """Return the weight of an adapted layer, or stack, in its own form, of `weight`, `lora_A` and so on.

    W + scaling * B A (arXiv 2106.09685, section 4.1), for DoRA with the trained length of each row.
    """
    own = parts[WEIGHT]
    computed = torch.promote_types(own.dtype, torch.float32)
    weight = (own.T if adapter.transposed else own).to(computed)
    weight = weight + adapter.scaling * (parts[LORA_B].to(computed) @ parts[LORA_A].to(computed))
    if adapter.has_magnitude:
        weight = weight * (parts[MAGNITUDE].to(computed) / torch.linalg.norm(weight, dim=1)).unsqueeze(1)
    return (weight.T if adapter.transposed else weight).to(computed if wide else own.dtype).contiguous()


def _split(name: str, adapters: Mapping[str, LayerAdapter]) -> tuple[str, str]:
    """Return (adapted layer, which part of its adapter `name` is); two empty strings for what stays as it is."""
    layer, _, part = name.rpartition(".")[0].rpartition(".")
    return (layer, part) if layer in adapters else ("", "")
