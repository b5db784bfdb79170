"""Cases of the rules in `plan/rules/freeze.py`."""

from __future__ import annotations

from dataclasses import replace

from tests.plan.rules.jobs import CPU4, FACTS, case

NAMED = replace(FACTS, parameter_shapes={"embed_in.weight": (10, 10), "layers.0.weight": (4, 4)})
FROZEN = replace(NAMED, frozen=frozenset(NAMED.parameter_shapes))

CASES = {
    "freeze-matches": case(
        {"model": {"freeze": ["embed_inn"]}}, {"model": {"freeze": ["embed_in"]}}, "did you mean 'embed_in'?",
        CPU4, NAMED,
    ),
    "freeze-all": case(
        {"model": {"freeze": ["embed_in", "layers"]}}, {"model": {"freeze": ["layers.[01]"]}}, "left to train",
        CPU4, FROZEN, NAMED,
    ),
}  # fmt: skip
