"""Cases of the rules in `plan/rules/tensor.py`."""

from __future__ import annotations

from tests.plan.rules.jobs import CPU4, CPU6, FACTS, GROUPED, NO_PLAN, TWO, case

CASES = {
    "tensor-model": case({"parallel": TWO}, {"parallel": TWO}, "no plan for xlm", CPU4, NO_PLAN, FACTS),
    "tensor-heads": case(
        {"parallel": {"tensor_parallel_degree": 4}},
        {"parallel": TWO},
        "does not share out the 12 attention heads and 6 key-value heads; use 1, 2, 3 or 6",
    ),
    "tensor-experts": case(
        {"parallel": {"tensor_parallel_degree": 3}, "precision": {"compute": "bf16"}},
        {"parallel": TWO, "precision": {"compute": "bf16"}},
        "6 of an expert's 16 inner features in bf16 are no multiple of the 16 bytes that grouped products read at "
        "once; use a degree of 1 or 2, or experts_implementation batched_mm",
        CPU6,
        GROUPED,
    ),
}
