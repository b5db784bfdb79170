"""The shapes of a rank's parameters under tensor parallelism, from the facts alone: what the memory formulas add up.

The same rules as `shardwise.parallel.tensor` follows when it cuts a model; a test holds the two against each other.
"""

from __future__ import annotations

import math

from shardwise.families.facts import ModelFacts, TensorSplit, chunk
from shardwise.plan import Plan


def local_shapes(facts: ModelFacts, plan: Plan, index: int = 0) -> dict[str, tuple[int, ...]]:
    """Parameter name -> its shape on tensor rank `index` before sharding; rank 0 has the largest part of everything."""
    degree = plan.degrees["tensor"]
    if degree == 1:
        return facts.parameter_shapes
    shapes = {name: _of_block(name, shape, facts, degree, index) for name, shape in facts.parameter_shapes.items()}
    for name in facts.vocabulary_parameters if plan.chunked_loss else ():
        shapes[name] = _cut(facts.parameter_shapes[name], 0, 1, degree, index)
    return shapes


def local_elements(facts: ModelFacts, plan: Plan, tensor: int, shard: int) -> int:
    """Parameters that the rank at these coordinates holds; `shard` counts over shard x context.

    Each has one gradient element, and as many elements of optimizer state as the class keeps.
    """
    ranks = plan.degrees["shard"] * plan.degrees["context"] if plan.needs_fsdp else 1
    total = 0
    for shape in local_shapes(facts, plan, tensor).values():
        rows = chunk(shape[0], ranks, shard) if shape else slice(0, 1)
        total += (rows.stop - rows.start) * math.prod(shape[1:])
    return total


def _of_block(name: str, shape: tuple[int, ...], facts: ModelFacts, degree: int, index: int) -> tuple[int, ...]:
    module, _, leaf = name.rpartition(".")
    split = facts.tensor_splits.get(module)
    dim = None if split is None else _dim(split, leaf)
    if split is None or dim is None:
        return shape
    copies = facts.key_value_copies(degree) if split.key_value else 1
    return _cut(shape, dim, split.sections, degree // copies, index // copies)


def _dim(split: TensorSplit, leaf: str) -> int | None:
    """The dim along which a parameter is cut: the bias of a row module belongs to the sum and stays whole."""
    if split.kind not in ("column", "row"):
        return None
    return split.dim if leaf == "weight" else 0 if split.kind == "column" else None


def _cut(shape: tuple[int, ...], dim: int, sections: int, degree: int, index: int) -> tuple[int, ...]:
    part = chunk(shape[dim] // sections, degree, index)
    return (*shape[:dim], (part.stop - part.start) * sections, *shape[dim + 1 :])
