"""Parameters whose optimizer state is in host memory (`memory.offload_optimizer`): a pure function of a rank's names.

They are taken whole, in the order in which backward finishes their gradients: blocks from the last to the first, then
what stands outside of blocks, whose unit is reduced last. So what is updated on the host has the rest of backward to be
updated in. Every rank of a stage chooses alike, whatever part of a tensor it holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from shardwise.model.facts import ModelFacts


def offloaded_parameters(facts: ModelFacts, names: Iterable[str], share: float) -> list[str]:
    """Return the first of a rank's trained parameters, in the order of backward, that hold `share` of its elements."""
    places = {block.name: place for place, block in enumerate(facts.blocks)}
    trained = [name for name in names if name not in facts.frozen]
    keys = {name: (places.get(facts.block_of.get(name, ""), -1), place) for place, name in enumerate(trained)}
    ordered = sorted(trained, key=keys.__getitem__, reverse=True)
    sizes = [math.prod(facts.parameter_shapes[name]) for name in ordered]
    wanted, chosen = share * sum(sizes), list[str]()
    for name, size in zip(ordered, sizes, strict=True):
        if wanted <= 0:
            break
        chosen.append(name)
        wanted -= size
    return chosen
