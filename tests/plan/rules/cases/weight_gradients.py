"""Cases of the rules in `plan/rules/weight_gradients.py`."""

from __future__ import annotations

from tests.plan.rules.jobs import case, staged

CASES = {
    "zero-bubble-compile": case(
        {**staged(pipeline="zero_bubble"), "model": {"compile": True}},
        {**staged(), "model": {"compile": True}},
        "pipeline interleaved",
    ),
}
