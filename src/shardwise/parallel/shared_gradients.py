"""Parameters that several ranks hold, each with a gradient of a part of the activations: sums over tensor ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from shardwise.job.axes import Axis
from shardwise.model.adapters import partial_adapters
from shardwise.model.facts import ModelFacts
from shardwise.parallel.layout import Layout
from shardwise.parallel.tensor_map import ParameterEntry, TensorMap


def partial_parameters(
    tensor_map: TensorMap, facts: ModelFacts, layout: Layout, scattered: bool
) -> tuple[tuple[Sequence[str], dist.ProcessGroup], ...]:
    """Return the names of parameters whose gradients are sums over ranks, with the group of those ranks. Collective.

    Over the tensor group they are those that the facts name, experts that are whole there, each with a part of the
    tokens, and with sequence parallelism (`scattered`) all whole ones of blocks; over neighbours the key-value heads of
    which each has a copy, for query heads of its own.
    """
    if layout.size(Axis.TENSOR) == 1:
        return ()
    modules = [name for name, split in facts.tensor_splits.items() if split.kind == "partial"]
    modules += partial_adapters(facts)
    modules += [block.name for block in facts.blocks] if scattered else []
    inside = tuple(f"{name}." for name in modules)
    whole = [
        entry.name for entry in tensor_map
        if (entry.split is None and entry.name.startswith(inside)) or _is_expert(entry)
    ]  # fmt: skip
    copies = {entry.name: entry.split.copies for entry in tensor_map if entry.split and entry.split.copies > 1}
    sums: list[tuple[Sequence[str], dist.ProcessGroup]] = [(whole, layout.group(Axis.TENSOR))] if whole else []
    if copies:
        sums.append((list(copies), layout.tensor_neighbours(max(copies.values()))))
    return tuple(sums)


def _is_expert(entry: ParameterEntry) -> bool:
    return entry.split is not None and entry.split.axis is Axis.EXPERT
