"""The packed form of a frozen base (`adapter.base`): which weights have it, and what it takes. Plain data.

A weight is packed block by block along its last dim; a block is a scale in fp32, and behind it the codes of its
elements. So a slice of a weight that begins and ends with a block is a slice of its packed form, on every layout.
kernels/packed_weights.py computes with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from shardwise.job.schema import AdapterSection
from shardwise.model.facts import ModelFacts
from shardwise.model.tensor_split import LINEAR_KINDS, TensorSplit

BLOCK = 64  # elements, as in QLoRA (arXiv 2305.14314, section 3)
SCALE_BYTES = 4
BLOCK_BYTES = {"nf4": SCALE_BYTES + BLOCK // 2, "int8": SCALE_BYTES + BLOCK}


def with_packed_base(facts: ModelFacts, settings: AdapterSection) -> ModelFacts:
    """Return `facts` with the frozen weights of the blocks' linear layers in the form that `settings` ask for.

    A weight that several modules share stays as it is.
    """
    if settings.base == "full" or not facts.adapters:
        return facts
    tied = {name for names in facts.ties for name in names}
    weights = [f"{layer}.weight" for layer in facts.linears]
    packed: dict[str, str] = {name: settings.base for name in weights if name in facts.frozen and name not in tied}
    return replace(facts, packed=packed)


def packed_shape(shape: Sequence[int], form: str) -> tuple[int, ...]:
    """Return the shape of the packed form of a weight: [..., blocks, bytes of one]."""
    return (*shape[:-1], shape[-1] // BLOCK, BLOCK_BYTES[form])


def packed_bytes(form: str) -> float:
    """Return the bytes that an element takes, its share of the scale included."""
    return BLOCK_BYTES[form] / BLOCK


def cut_blocks(facts: ModelFacts, degree: int) -> Iterator[tuple[str, int]]:
    """Yield (weight, elements of a row) where these, as one of `degree` tensor ranks has them, are no whole blocks."""
    for name in facts.packed:
        shape, split = facts.parameter_shapes[name], facts.tensor_splits.get(name.removesuffix(".weight"))
        sizes = _local_sections(facts, shape, split, degree) if degree > 1 and split is not None else [shape[-1]]
        yield from ((name, size) for size in sizes if size % BLOCK)


def _local_sections(facts: ModelFacts, shape: Sequence[int], split: TensorSplit, degree: int) -> list[int]:
    """Return the sizes of what a tensor rank has of each section along the last dim."""
    last = len(shape) - 1
    if split.kind not in LINEAR_KINDS or split.dim != last:
        return [shape[-1]]
    sections, groups = split.along(shape[last], degree)
    ranks = degree // groups // (facts.key_value_copies(degree) if split.key_value else 1)
    return [-(-section // ranks) for section in sections] + [section % ranks for section in sections]
