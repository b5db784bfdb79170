"""Chooses the linear layers of a model that are worth multiplying in float8. Plain data, nothing here computes.

A product in float8 pays for casting its factors, which are read and written once more, with a multiplication that
takes about half as long. Work grows with the product of a layer's sizes and casting with their sum, so small layers
lose. From where on they gain torchao has measured on an H100 (README of torchao.float8, "Performance"; its own choice
of layers). Embeddings, norms and head are never among them: they are outside of blocks, or no linear layers.
"""

from __future__ import annotations

from shardwise.model.facts import ModelFacts
from shardwise.model.tensor_split import LINEAR_KINDS

MULTIPLE = 16  # of both sizes of a layer, or the hardware's products refuse it
# Scaling -> pairs: a layer of at most so many (inputs, outputs) does not gain.
TOO_SMALL = {
    "tensorwise": ((4096, 1024),),
    "rowwise": ((1024, 1 << 62), (1 << 62, 2048), (2048, 4096)),
}
ENDS = "in the first or the last block, where rounding costs most"


def left_out(facts: ModelFacts, scaling: str, tensor_degree: int = 1) -> dict[str, str]:
    """Return linear layer of the blocks -> why it is left in the compute dtype; empty where it is not.

    Args:
        facts: of the model.
        scaling: by whose rule layers are too small and ends are left; empty: none is, only what cannot be done.
        tensor_degree: ranks that share a layer; it is the part that has to be large enough.
    """
    ends = tuple(f"{block.name}." for block in (*facts.blocks[:1], *facts.blocks[-1:]))
    reasons = {}
    for name in facts.linears:
        sizes = local_sizes(facts, name, tensor_degree)
        if any(size % MULTIPLE for size in sizes):
            reason = f"{sizes[0]} x {sizes[1]} is no multiple of {MULTIPLE}"
        elif scaling and name.startswith(ends):
            reason = ENDS
        elif scaling and any(sizes[0] <= inputs and sizes[1] <= outputs for inputs, outputs in TOO_SMALL[scaling]):
            reason = f"{sizes[0]} x {sizes[1]} is too small to gain from {scaling} scaling"
        else:
            reason = ""
        reasons[name] = reason
    return reasons


def local_sizes(facts: ModelFacts, name: str, tensor_degree: int) -> tuple[int, int]:
    """Return (inputs, outputs) of a linear layer's part on one tensor rank."""
    inputs, outputs = facts.linears[name]
    split = facts.tensor_splits.get(name)
    if split is None or tensor_degree == 1 or split.kind not in LINEAR_KINDS:
        return inputs, outputs
    if split.kind == "row":
        return inputs // tensor_degree, outputs
    copies = facts.key_value_copies(tensor_degree) if split.key_value else 1
    return inputs, outputs * copies // tensor_degree


def float8_summary(left: dict[str, str]) -> str:
    """Return how many of the layers are in float8, and why the others are not."""
    counts: dict[str, int] = {}
    for reason in left.values():
        if reason:
            counts[reason] = counts.get(reason, 0) + 1
    taken = sum(not reason for reason in left.values())
    rest = "; ".join(f"{count} left: {reason}" for reason, count in counts.items())
    return f"{taken} of {len(left)} linear layers of the blocks" + (f"; {rest}" if rest else "")
